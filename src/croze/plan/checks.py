"""What a check is: a name, a function that looks and reports, and the checks it cannot do without.

A check adds findings to the ``Report`` it is handed. A CrozeError that it lets out is a failed finding of that
error's kind; any other exception is a defect, told as one failed finding, and the other checks go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from croze.errors import CrozeError, WaitExpired
from croze.run import Run

if TYPE_CHECKING:
    from croze.env.tasks import TaskSource
    from croze.models.architecture import Architecture
    from croze.models.protocol import ModelFiles, Tokenizer
    from croze.plan.bare_process import BareProcess
    from croze.types import Task

T = TypeVar("T")
Status = Literal["ok", "warn", "fail"]
WORST_FIRST: dict[Status, int] = {"fail": 0, "warn": 1, "ok": 2}
SKIPPED, INTERNAL = "skipped", "internal"
"""Kinds of a check that could not be made because of another, and of a defect in a check itself."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found. ``kind`` is stable and meant for programs: a CrozeError's, or CHECK.WHAT; where nothing
    is wrong, the check's name. ``where`` names a key, file or task; ``fix`` says what to do."""

    check: str
    kind: str
    status: Status
    message: str
    where: str | None = None
    fix: str | None = None


class Report:
    """The findings of one check as it makes them."""

    def __init__(self, check: str) -> None:
        self.check = check
        self.findings: list[Finding] = []

    def ok(self, message: str, *, where: str | None = None) -> None:
        self._add(self.check, "ok", message, where, None)

    def warn(self, kind: str, message: str, *, where: str | None = None, fix: str | None = None) -> None:
        self._add(kind, "warn", message, where, fix)

    def fail(self, kind: str, message: str, *, where: str | None = None, fix: str | None = None) -> None:
        self._add(kind, "fail", message, where, fix)

    def error(self, error: CrozeError) -> None:
        self.fail(error.kind, error.message, where=error.where, fix=error.fix)

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """A part of the check whose CrozeError is a failed finding and does not keep the other parts from running."""
        try:
            yield
        except CrozeError as error:
            self.error(error)

    @property
    def status(self) -> Status:
        """The worst of its findings."""
        found = {f.status for f in self.findings}
        return "fail" if "fail" in found else "warn" if "warn" in found else "ok"

    def _add(self, kind: str, status: Status, message: str, where: str | None, fix: str | None) -> None:
        self.findings.append(
            Finding(check=self.check, kind=kind, status=status, message=message, where=where, fix=fix)
        )


@dataclass(slots=True, kw_only=True)
class Context:
    """The run that is checked, and what checks have found out so far for those after them."""

    run: Run
    source: TaskSource | None = None
    tasks: list[Task] = field(default_factory=list)
    """A sample of the tasks in the order of training, and after them the longest of those that were read."""
    files: ModelFiles | None = None
    arch: Architecture | None = None
    tokenizer: Tokenizer | None = None
    longest_prompt: int = 0
    """Tokens of the longest prompt in ``tasks``."""
    bare: BareProcess | None = None
    """What a training process takes before it holds a model: being measured while other checks are made."""

    def close(self) -> None:
        if self.bare is not None:
            self.bare.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """``needs``: checks that must not have failed (nor been left out) for this one to mean anything. ``aside``: it
    mostly waits for other processes, and is made while those after it are."""

    name: str
    look: Callable[[Any, Report], None]
    needs: tuple[str, ...] = ()
    aside: bool = False


def make(checks: tuple[Check, ...], context: Any) -> list[Finding]:
    """Every check once, in order; what was found, failures first."""
    under_way = {check.name: _UnderWay(check) for check in checks}
    for check in checks:
        under_way[check.name].start(context, [under_way[n] for n in check.needs if n in under_way])
    return failures_first([finding for each in under_way.values() for finding in each.report.findings])


class _UnderWay:
    """A check that is being made, beside others where it is ``aside``. Asking for its ``report`` waits for its end."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self._report = Report(check.name)
        self._thread: threading.Thread | None = None
        self._skipped = False

    def start(self, context: Any, needed: Sequence[_UnderWay]) -> None:
        missing = next((each for each in needed if each.out), None)
        if missing is not None:
            self._skipped = True
            self._report.warn(SKIPPED, f"not checked: {missing.check.name} {missing.out}")
        elif self.check.aside:
            # a daemon: Ctrl-C must not wait for it, and what it started dies with its thread
            self._thread = threading.Thread(
                target=_look, args=(self.check, context, self._report), daemon=True
            )
            self._thread.start()
        else:
            _look(self.check, context, self._report)

    @property
    def report(self) -> Report:
        if self._thread is not None:
            self._thread.join()
        return self._report

    @property
    def out(self) -> str:
        """Why others cannot build on it; empty where they can."""
        if self._skipped:
            return "was not checked"
        return "failed" if self.report.status == "fail" else ""


def failures_first(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda f: WORST_FIRST[f.status])


def _look(check: Check, context: Any, report: Report) -> None:
    try:
        check.look(context, report)
    except CrozeError as error:
        report.error(error)
    except (
        Exception
    ) as error:  # supervision boundary: a defect in one check must not hide what the others find
        frame = traceback.extract_tb(error.__traceback__)[-1]
        report.fail(
            INTERNAL,
            f"the check itself failed: {type(error).__name__}: {error}",
            where=f"{frame.filename}:{frame.lineno}",
            fix="please report this",
        )
    if not report.findings:
        report.ok("as it should be")


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where this thread runs an event loop already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(asyncio.run, work).result()


@contextlib.contextmanager
def deadline(seconds: float, what: str, where: str) -> Iterator[None]:
    """Ends user code that takes longer, with WaitExpired. Only in the main thread: elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise WaitExpired(f"{what} took longer than {seconds:g} s", where=where)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
