"""Findings of checks, as `croze check` and `croze doctor` show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from croze.cli.output import Output, printable

if TYPE_CHECKING:
    from croze.plan.checks import Finding


def show(findings: Sequence[Finding], output: Output) -> None:
    """With --json one list on a line; as text a line each, failures first, with what to do."""
    if output.json:
        import msgspec

        output.record(msgspec.to_builtins(findings))
        return
    width = max(len(f.check) for f in findings)
    for f in findings:
        lead = f"{f.status.upper() if f.status == 'fail' else f.status:<4}  {f.check:<{width}}  "
        output.text(lead + printable(f.message))
        indent = " " * len(lead)
        if f.status != "ok" and f.where:
            output.text(f"{indent}where: {printable(f.where)}")
        if f.fix:
            output.text(f"{indent}do:    {printable(f.fix)}")
    output.text(_summary(findings))


def _summary(findings: Sequence[Finding]) -> str:
    counts = {status: sum(f.status == status for f in findings) for status in ("fail", "warn", "ok")}
    return f"{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failed"
