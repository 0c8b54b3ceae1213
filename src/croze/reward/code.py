"""Grading code by hidden tests, so that the code cannot grade itself.

The files under test run in one fresh sandbox, the tests in another, and only plain values go between them, by
way of this process: the process that reaches the verdict never imported the model's code, shares no kernel
objects with it, and the code never sees a test or an expected value. Exiting early, printing "PASS", patching
``assert``, objects that equal everything, searching disk and memory: all that the code can bring about is
wrong values.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

import msgspec

from croze.errors import RewardFault, SandboxFault
from croze.sandbox.protocol import ExecResult, Sandbox

_PATIENCE_S = 60.0
"""How long the tests may go on asking, all turns together."""
_FIRST_TURN = 256
"""Questions a turn at first; later four times as many as are answered."""
_STEADY = "seed what they draw, and keep clocks and addresses out of what they ask"
_RESULTS, _VERDICT = ".croze-results", ".croze-verdict"
_MOST, _MOST_EACH = 32 << 20, 8 << 20
"""Bytes of answers that the code under test may give, in all and at a time."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One check. ``call``: an expression over the files' names, ``expected`` its value as plain data.
    ``stdin``: what the program reads, ``expected`` what it must print (space at line ends apart)."""

    expected: Any
    call: str | None = None
    stdin: str | None = None


class TestReport(msgspec.Struct, frozen=True, kw_only=True):
    """How many checks passed. ``failures`` say which did not, and why."""

    __test__ = False

    passed: int
    total: int
    failures: tuple[str, ...] = ()

    @property
    def score(self) -> float:
        """Share of the checks that passed, in [0, 1]; 0 where there are none."""
        return self.passed / self.total if self.total else 0.0

    @property
    def ok(self) -> bool:
        return self.total > 0 and self.passed == self.total


async def run_tests(
    sandbox: Sandbox,
    files: Mapping[str, str],
    tests: str | Sequence[Case],
    *,
    main: str | None = None,
    cpu_s: float | None = None,
    wall_s: float | None = None,
) -> TestReport:
    """Hold ``files`` (path -> source) against hidden tests, in two fresh siblings of ``sandbox``.

    ``tests`` is Python source: top-level asserts, ``check(candidate)`` calls, ``test_*`` functions, unittest
    cases, and compound statements that hold asserts (one check each); names it does not define are those of
    ``files``. Or a list of ``Case``; ``main`` is the file that stdin cases run (the first by default).
    ``cpu_s`` and ``wall_s`` bound each run of the code.

    The code under test is run again from the start, with the same files and random seed, whenever the tests ask
    what they could not guess. Plain data goes in and out (see ``plain.py``), exceptions cross by class name, and
    objects of the code can be called, indexed, iterated and asked for attributes. They never decide: against
    plain data they fail, and to compare two of them is a fault of the tests. A coroutine is run to its end when
    it is made. Raises RewardFault, with the line, where the tests are broken, hold no check, or want what cannot
    cross (functions as arguments, say), or go on asking for a minute, and where there are no files; and the
    sandbox's infra faults.
    """
    cases = [] if isinstance(tests, str) else list(tests)
    source = tests if isinstance(tests, str) else _as_source(cases)
    _refuse(files, main, cases, source)
    code = await sandbox.sibling()
    try:
        for path, text in files.items():
            await code.write(path, text)
        limits = _Limits(cpu_s=cpu_s, wall_s=wall_s)
        report = TestReport(passed=0, total=0)
        if source.strip():
            judge = await sandbox.sibling()
            try:
                report = await _Grading(code, judge, source, files, limits).run()
            finally:
                await judge.destroy()
        program = files[main or next(iter(files))]
        for case in cases:
            if case.stdin is not None:
                report = _plus(
                    report, case, await code.exec_python(program, stdin=case.stdin.encode(), **limits)
                )
        return report
    finally:
        await code.destroy()


class _Limits(TypedDict):
    cpu_s: float | None
    wall_s: float | None


class _Grading:
    """Turns of asking the code what the tests want to know, until they can decide."""

    def __init__(
        self, code: Sandbox, judge: Sandbox, tests: str, files: Mapping[str, str], limits: _Limits
    ) -> None:
        self._code = code
        self._judge = judge
        self._tests = tests
        self._files = list(files)
        self._modules = _modules(files)
        self._limits = limits
        self._log: list[Any] = []
        self._results: list[Any] = []
        self._dead = ""
        self._timid = False
        """Ask one question a turn: a guess led the tests into a trap."""

    async def run(self) -> TestReport:
        loop = asyncio.get_running_loop()
        until = loop.time() + _PATIENCE_S
        settled, before = -1, []
        while loop.time() < until:
            verdict = await self._decide()
            if "needs" not in verdict:
                return _report(verdict)
            kept = verdict["kept"]
            # What is asked first after settled answers is no guess, so each turn settles one more at least.
            strays = kept <= settled
            if strays and self._results[:kept] == before[:kept]:
                raise _tests_fault("they ask something else each time that they run", _STEADY)
            settled, before = kept, self._results
            self._log = self._log[:kept] + verdict["needs"]
            if strays:
                self._results = self._results[:kept]
                self._dead = "the code answers something else each time that it runs"
            else:
                await self._answer()
        raise _tests_fault(
            f"they asked for {_PATIENCE_S:.0f} s, {len(self._results)} answers so far",
            "let fewer questions depend on the answer to the one before, or split the tests",
        )

    async def _decide(self) -> dict[str, Any]:
        asked = {
            "tests": self._tests,
            "modules": self._modules,
            "log": self._log,
            "results": self._results,
            "dead": self._dead,
            "most": 1 if self._timid else max(_FIRST_TURN, 4 * len(self._results)),
            "verdict": _VERDICT,
        }
        program = _script("inside_answers.py", "inside_tests.py")
        # Nothing of a former turn may stand where this one's verdict is looked for.
        await self._judge.write(_VERDICT, b"")
        ended = await self._judge.exec_python(program, stdin=json.dumps(asked).encode())
        try:
            return json.loads(await self._judge.read(_VERDICT))
        except (OSError, ValueError):
            pass
        if not self._timid:
            self._timid = True
            return await self._decide()
        if not self._results:
            raise _tests_fault(f"they did not end: {_ending(ended)}", "mend the task's tests")
        return {"passed": 0, "failed": [["tests", f"did not end: {_ending(ended)}"]]}

    async def _answer(self) -> None:
        """Run the code through the whole log. What it leaves unanswered, it has failed."""
        asked = {"modules": self._modules, "files": self._files, "log": self._log, "results": _RESULTS}
        ended = await self._code.exec_python(
            _script("inside_model.py"), stdin=json.dumps(asked).encode(), **self._limits
        )
        if ended.fault == "unknown":
            raise SandboxFault("the host was too busy to run the code under test", where="code grader")
        lines = await self._told()
        first, self._results = (lines[0] if lines else None), lines[1 : len(self._log) + 1]
        self._dead = ""
        if first is None or "e" in first:
            told = (
                ": ".join(map(str, first["e"])) if first and isinstance(first["e"], list) else _ending(ended)
            )
            self._dead = f"the code cannot be imported: {told}"
        elif len(self._results) < len(self._log):
            self._dead = f"the code did not return: {_ending(ended)}"

    async def _told(self) -> list[dict[str, Any]]:
        """Well-formed results, up to the first that is not."""
        try:
            data = await self._code.read(_RESULTS)
        except OSError:
            return []
        told: list[dict[str, Any]] = []
        for line in data[:_MOST].split(b"\n")[:-1]:
            try:
                result = json.loads(line)
            except (ValueError, RecursionError):
                break
            if len(line) > _MOST_EACH or not isinstance(result, dict) or not {"v", "h", "e"} & result.keys():
                break
            told.append(result)
        return told


def _report(verdict: dict[str, Any]) -> TestReport:
    if "error" in verdict:
        raise RewardFault(verdict["error"], where="hidden tests", fix="mend the task's tests")
    failed = tuple(f"{check}: {why}" for check, why in verdict["failed"])
    return TestReport(passed=verdict["passed"], total=verdict["passed"] + len(failed), failures=failed)


def _tests_fault(why: str, fix: str) -> RewardFault:
    return RewardFault(f"the tests cannot be graded: {why}", where="hidden tests", fix=fix)


def _plus(report: TestReport, case: Case, result: ExecResult) -> TestReport:
    """One stdin case more."""
    passed = result.ok and not result.truncated and _lines(result.text) == _lines(str(case.expected))
    failures = (
        report.failures if passed else (*report.failures, f"stdin {case.stdin!r:.80}: {_ending(result)}")
    )
    return TestReport(passed=report.passed + passed, total=report.total + 1, failures=failures)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _ending(result: ExecResult) -> str:
    last = result.error_text.strip().rpartition("\n")[2][:200]
    return f"{result.status} {result.exit_code if result.signal is None else result.signal}; {last}".rstrip(
        "; "
    )


def _as_source(cases: Sequence[Case]) -> str:
    return "\n".join(f"assert ({c.call}) == {c.expected!r}" for c in cases if c.call is not None)


def _refuse(files: Mapping[str, str], main: str | None, cases: Sequence[Case], source: str) -> None:
    """What nothing can be graded by."""
    if not files:
        raise RewardFault("there are no files to test", where="run_tests", fix="give {'solution.py': source}")
    if main is not None and main not in files:
        raise RewardFault(
            f"{main!r} is none of the files", where="run_tests main", fix=f"one of {list(files)}"
        )
    if not cases and not source.strip():
        raise _tests_fault("the tests hold no check", "give asserts, test functions or cases")
    for number, case in enumerate(cases):
        if (case.call is None) == (case.stdin is None):
            raise _tests_fault(f"case {number} needs either call or stdin", "mend the task's tests")


def _modules(files: Mapping[str, str]) -> list[str]:
    """Importable names of the files, in order."""
    paths = [PurePosixPath(f) for f in files if f.endswith(".py")]
    parts = [(p.parent if p.name == "__init__.py" else p.with_suffix("")).parts for p in paths]
    return [".".join(p) for p in parts if p and all(part.isidentifier() for part in p)]


def _script(*names: str) -> str:
    """A program for the inside, with the codec that it shares with the outside."""
    folder = Path(__file__).parent
    # The files under test may be named like modules that the program needs.
    first = "import sys\nsys.path[:] = [p for p in sys.path if p]\n"
    return first + "\n\n".join((folder / name).read_text() for name in ("plain.py", *names))
