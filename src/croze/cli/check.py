"""Check a run before it starts: declaration, tasks, reward, model, memory, disk, isolation. Seconds.

croze check calc.py                     every check, failures first, each with what to do
croze check calc.py optim.lr=2e-5       with keys overridden
croze check calc.py --rehearse          also two steps with a tiny model of the same family (a minute at most)
croze check runs/calc-1f2e3d            can this run go on?

--json prints one list of {check, kind, status, message, where, fix}, status being ok, warn or fail.
Exit code 0: nothing failed (with --strict: no warnings either); 1: a check failed; 2: there is no run to check (the
file cannot be loaded, or an override is wrong: in the list too).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from croze.cli.findings import show
from croze.cli.output import Output
from croze.config import parse_words
from croze.errors import ConfigError, CrozeError, UsageError
from croze.loop.load import load_run
from croze.run import Run

FAILED = 1


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the task file, or the folder of a run")
    parser.add_argument("words", nargs="*", metavar="key=value", help="overrides")
    parser.add_argument("--rehearse", action="store_true", help="train two steps with a tiny model")
    parser.add_argument("--strict", action="store_true", help="warnings fail too")


def run(arguments: argparse.Namespace, output: Output) -> int:
    from croze.plan import preflight

    path = Path(arguments.file)
    if path.is_dir():
        if arguments.words or arguments.rehearse:
            raise UsageError(
                "a run folder has its values and is not rehearsed", where=str(path), fix=f"croze check {path}"
            )
        findings = preflight.check_folder(path)
        wrong_use = any(f.check == "folder" and f.where == str(path) and f.status == "fail" for f in findings)
    else:
        declared, errors = _declared(arguments.file, arguments.words)
        wrong_use = declared is None
        if declared is None:
            findings = [preflight.refused(error) for error in errors]
        else:
            findings = preflight.check(declared, rehearse=arguments.rehearse)
    show(findings, output)
    if wrong_use:
        return UsageError.exit_code
    bad = ("fail", "warn") if arguments.strict else ("fail",)
    return FAILED if any(f.status in bad for f in findings) else 0


def _declared(file: str, words: Sequence[str]) -> tuple[Run | None, list[CrozeError]]:
    """The run, or all that is wrong with its declaration: every override is tried by itself."""
    try:
        parsed = parse_words(words)
        declared = load_run(file)
    except CrozeError as error:
        return None, [error]
    try:
        return declared.override(parsed), []
    except ConfigError as error:
        errors: list[CrozeError] = []
        for key, value in parsed.items():
            try:
                declared.override({key: value})
            except CrozeError as one:
                errors.append(one)
        return None, errors or [error]
