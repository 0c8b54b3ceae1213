"""``croze VERB ...``: finds the verb, imports only what it needs, turns errors into exit codes."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

import croze
from croze.cli.output import Output
from croze.config import suggest
from croze.errors import CrozeError, Interrupted, UsageError

VERBS = {
    "init": "write a task file to start from",
    "train": "train the run that a task file declares",
    "resume": "go on with a run that was stopped or died",
    "check": "hold a run against its tasks, reward, model and this machine, before it starts",
    "eval": "measure pass@k of a task file's model, or of a run's newest weights, on held-out tasks",
    "replay": "make a recorded step again, compare it with what the run logged, show the samples that dominate",
    "trace": "list and show the rollouts of a run; query its trace with SQL",
    "ps": "list runs: what each is doing, how far it is, whether it can be resumed",
    "stop": "stop a run in order: it saves and can be resumed",
    "keys": "list every key=value with its default and meaning",
    "doctor": "look at this machine: cores, memory, versions, CUDA, exactness, isolation; a fix for what is wrong",
    "completions": "print completions for bash, zsh or fish",
}
INTERNAL_ERROR = 3


class Parser(argparse.ArgumentParser):
    """Wrong words become a UsageError instead of an exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, where=self.prog, fix=f"see `{self.prog} --help`")


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 0 ok, 1 check failed, 2 wrong use, 3 infra fault, 4 interrupted."""
    program, words = words is None, list(sys.argv[1:] if words is None else words)
    # idle OpenMP threads sleep rather than spin: beside another busy process spinning costs several times the work
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Output(json="--json" in words) as output:
        try:
            code = _dispatch(words, output)
            output.flush()
            return code
        except (CrozeError, KeyboardInterrupt) as error:
            if program:
                _hear_no_more()
            if isinstance(error, KeyboardInterrupt):
                where = " ".join(["croze", *words[:1]])
                error = Interrupted("stopped from outside", where=where, fix="give the command again")
            return _report(error, output)
        except BrokenPipeError:  # whoever read our output went away
            return Interrupted.exit_code
        except (
            Exception
        ) as error:  # the outermost boundary: a defect of ours or of the user's code, shown whole
            traceback.print_exc()
            if output.json:
                text = f"{type(error).__name__}: {error}"
                output.record(
                    {"event": "error", "kind": "internal", "message": text, "where": None, "fix": None}
                )
            return INTERNAL_ERROR


def _dispatch(words: list[str], output: Output) -> int:
    """Run the verb; its exit code, which is 0 for verbs that say nothing of it."""
    known = [word for word in words if word != "--json"]
    if not known or known[0] in ("-h", "--help", "help"):
        output.text(_overview())
        if not known:
            raise UsageError("no verb is given", where="croze", fix="croze train FILE")
        return 0
    if known[0] in ("-V", "--version"):
        output.text(f"croze {croze.__version__}")
        return 0
    verb = known[0]
    if verb not in VERBS:
        raise UsageError(
            f"unknown verb {verb!r}", where="croze", fix=suggest(verb, VERBS) or "see `croze --help`"
        )
    module, parser = parser_of(verb)
    try:
        arguments = parser.parse_intermixed_args(known[1:])
    except SystemExit:  # --help printed itself
        return 0
    return module.run(arguments, output) or 0


def parser_of(verb: str) -> tuple[ModuleType, Parser]:
    """A verb's module and its parser."""
    module = importlib.import_module(f"croze.cli.{verb}")
    parser = Parser(prog=f"croze {verb}", description=module.__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")
    module.configure(parser)
    return module, parser


def _overview() -> str:
    width = max(map(len, VERBS)) + 2
    verbs = "\n".join(f"  {name:<{width}}{summary}" for name, summary in VERBS.items())
    return (
        "croze: RL post-training for language models\n\n"
        "usage: croze VERB ...    (croze VERB --help says more)\n\n"
        f"{verbs}\n\n"
        "  croze train calc.py optim.lr=2e-5 steps=60\n\n"
        "Every verb takes --json (one JSON object a line).\n"
        "Exit codes: 0 ok, 1 a check failed, 2 wrong use, 3 infra fault, 4 interrupted."
    )


def _hear_no_more() -> None:
    """The end is being told: a second Ctrl-C must not cut it off.

    ``exec`` of a text, as here of none, makes CPython forget that another one was interrupted, inside an import for
    example. Else it would end by the signal, whatever exit code we give.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exec("")


def _report(error: CrozeError, output: Output) -> int:
    with contextlib.suppress(BrokenPipeError):  # nobody reads it; the exit code still says it
        if output.json:
            output.record(
                {
                    "event": "error",
                    "kind": error.kind,
                    "message": error.message,
                    "where": error.where,
                    "fix": error.fix,
                }
            )
        else:
            print(error, file=sys.stderr, flush=True)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
