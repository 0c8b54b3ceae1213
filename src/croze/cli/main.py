"""``croze VERB ...``: finds the verb, imports only what it needs, turns errors into exit codes."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import croze
from croze.cli.output import Output
from croze.config import suggest
from croze.errors import CrozeError, Interrupted, UsageError

VERBS = {
    "train": "train the run that a task file declares",
    "eval": "measure pass@k of a task file's model, or of a run's newest weights, on held-out tasks",
    "trace": "list and show the rollouts of a run; query its trace with SQL",
    "keys": "list every key=value with its default and meaning",
}
INTERNAL_ERROR = 3


class Parser(argparse.ArgumentParser):
    """Wrong words become a UsageError instead of an exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, where=self.prog, fix=f"see `{self.prog} --help`")


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 0 ok, 1 check failed, 2 wrong use, 3 infra fault, 4 interrupted."""
    words = list(sys.argv[1:] if words is None else words)
    # idle OpenMP threads sleep rather than spin: beside another busy process spinning costs several times the work
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Output(json="--json" in words) as output:
        try:
            _dispatch(words, output)
            output.flush()
        except CrozeError as error:
            return _report(error, output)
        except KeyboardInterrupt:
            return _report(Interrupted("stopped from outside", where=f"croze {' '.join(words[:1])}"), output)
        except BrokenPipeError:
            # Whoever read our output went away; Python must not fail once more when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
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
    return 0


def _dispatch(words: list[str], output: Output) -> None:
    known = [word for word in words if word != "--json"]
    if not known or known[0] in ("-h", "--help", "help"):
        output.text(_overview())
        if not known:
            raise UsageError("no verb is given", where="croze", fix="croze train FILE")
        return
    if known[0] in ("-V", "--version"):
        output.text(f"croze {croze.__version__}")
        return
    verb = known[0]
    if verb not in VERBS:
        raise UsageError(
            f"unknown verb {verb!r}", where="croze", fix=suggest(verb, VERBS) or "see `croze --help`"
        )
    module = importlib.import_module(f"croze.cli.{verb}")
    parser = Parser(prog=f"croze {verb}", description=module.__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")
    module.configure(parser)
    try:
        arguments = parser.parse_intermixed_args(known[1:])
    except SystemExit:  # --help printed itself
        return
    module.run(arguments, output)


def _overview() -> str:
    verbs = "\n".join(f"  {name:<8}{summary}" for name, summary in VERBS.items())
    return (
        "croze: RL post-training for language models\n\n"
        "usage: croze VERB ...    (croze VERB --help says more)\n\n"
        f"{verbs}\n\n"
        "  croze train calc.py optim.lr=2e-5 steps=60\n\n"
        "Every verb takes --json (one JSON object a line).\n"
        "Exit codes: 0 ok, 1 a check failed, 2 wrong use, 3 infra fault, 4 interrupted."
    )


def _report(error: CrozeError, output: Output) -> int:
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
