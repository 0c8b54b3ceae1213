"""Look at this machine: is it fit for croze, and where it is not, what to do. A few seconds; nothing is changed.

Cores, memory, disk and limits; Python and the versions of packages; CUDA, arithmetic and whether engine and trainer can
agree bit for bit; isolation (a sandbox is really started); extras and the cache of models.

--json prints one list of {check, kind, status, message, where, fix}, as `croze check` does. Exit code 1: something
that croze needs fails. Warnings are worth a look: some runs will be slower, or cannot do all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from croze.cli.findings import show
from croze.cli.output import Output
from croze.errors import InfraFault

FAILED = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """It takes nothing but --json."""


def run(arguments: argparse.Namespace, output: Output) -> int:
    try:
        from croze.plan.doctor import diagnose
    except ModuleNotFoundError as error:
        raise InfraFault(
            f"a package that croze cannot do without is not installed: {error.name}",
            where="packages",
            fix="pip install --upgrade croze (in its source tree: pip install -e .)",
        ) from error

    findings = diagnose(Path())
    show(findings, output)
    return FAILED if any(finding.status == "fail" for finding in findings) else 0
