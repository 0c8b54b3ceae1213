"""``check`` a run before anything is started: every check once, cheap ones first, failures first in the answer."""

from __future__ import annotations

import contextlib
from pathlib import Path

from croze.errors import CrozeError
from croze.plan import (
    checks_declaration,
    checks_folder,
    checks_machine,
    checks_model,
    checks_reward,
    checks_tasks,
    checks_tokens,
)
from croze.plan.checks import Check, Context, Finding, Report, make
from croze.plan.rehearsal import look_at_rehearsal
from croze.run import Run

CHECKS = (
    Check(name="values", look=checks_declaration.look_at_values),
    Check(name="model", look=checks_model.look_at_model),
    Check(name="declaration", look=checks_declaration.look_at_declaration),
    Check(name="tasks", look=checks_tasks.look_at_tasks),
    Check(name="columns", look=checks_declaration.look_at_columns, needs=("declaration", "tasks")),
    Check(name="isolation", look=checks_machine.look_at_isolation, needs=("declaration",)),
    Check(name="reward", look=checks_reward.look_at_reward, needs=("columns", "isolation"), aside=True),
    Check(name="machine", look=checks_machine.look_at_machine),
    Check(name="tokenizer", look=checks_tokens.look_at_tokenizer, needs=("model",)),
    Check(name="prompts", look=checks_tasks.look_at_prompts, needs=("tasks", "model", "tokenizer")),
    Check(name="shape", look=checks_declaration.look_at_shape, needs=("declaration", "model")),
    Check(name="disk", look=checks_machine.look_at_disk, needs=("model",)),
    Check(name="memory", look=checks_machine.look_at_memory, needs=("declaration", "model", "prompts")),
)
REHEARSAL = Check(
    name="rehearsal",
    look=look_at_rehearsal,
    needs=("columns", "isolation", "tokenizer", "prompts", "shape", "reward"),
)


def check(run: Run, *, rehearse: bool = False) -> list[Finding]:
    """Hold a run against its tasks, its reward, its model and this machine, in seconds; nothing is trained.

    ``rehearse`` adds two steps of the real loop with a tiny model of the same family, within a minute. Returns
    findings, failures first, then warnings; a run is good to go when none has ``status == "fail"``. Raises
    nothing for what it finds. A model that is not on this machine is fetched, as ``train`` would.
    """
    with contextlib.closing(Context(run=run)) as context:
        return make((*CHECKS, REHEARSAL) if rehearse else CHECKS, context)


def check_folder(path: Path) -> list[Finding]:
    """Whether the run of a folder can go on, without changing anything in it. Findings as of ``check``."""
    return make(checks_folder.CHECKS, checks_folder.FolderContext(path=path))


def refused(error: CrozeError, check: str = "declaration") -> Finding:
    """The finding for a run that could not even be declared."""
    report = Report(check)
    report.error(error)
    return report.findings[0]
