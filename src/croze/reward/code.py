"""Grading code by hidden tests, so that the code cannot grade itself.

The files under test run in one fresh sandbox, the tests in another, and only plain values go between them, by
way of this process: the process that reaches the verdict never imported the model's code, shares no kernel
objects with it, and the code never sees a test or an expected value. Exiting early, printing "PASS", patching
``assert``, objects that equal everything, searching disk and memory: all that the code can bring about is
wrong values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

import msgspec

from croze.errors import RewardFault, SandboxFault
from croze.sandbox.protocol import ExecResult, Sandbox

_ROUNDS = 64
_RESULTS, _VERDICT = ".croze-results", ".croze-verdict"
_MOST = 8 << 20
"""Bytes of answers that the code under test may give."""


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
    cases; names it does not define are those of ``files``. Or a list of ``Case``; ``main`` is the file that
    stdin cases run (the first by default). ``cpu_s`` and ``wall_s`` bound each run of the code.

    The code under test is run again from the start whenever the tests ask something new. Only plain data goes
    in and out (its objects can be called and asked for attributes, never compared). Raises RewardFault where
    the tests themselves are broken, and the sandbox's infra faults.
    """
    cases = [] if isinstance(tests, str) else list(tests)
    source = tests if isinstance(tests, str) else _as_source(cases)
    code = await sandbox.sibling()
    try:
        for path, text in files.items():
            await code.write(path, text)
        limits = _Limits(cpu_s=cpu_s, wall_s=wall_s)
        report = TestReport(passed=0, total=0)
        if source.strip():
            judge = await sandbox.sibling()
            try:
                report = await _Grading(code, judge, source, _modules(files), limits).run()
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
    """Rounds of asking the code what the tests want to know, until they can decide."""

    def __init__(
        self, code: Sandbox, judge: Sandbox, tests: str, modules: list[str], limits: _Limits
    ) -> None:
        self._code = code
        self._judge = judge
        self._tests = tests
        self._modules = modules
        self._limits = limits
        self._log: list[Any] = []
        self._results: list[Any] = []
        self._dead = ""

    async def run(self) -> TestReport:
        for _ in range(_ROUNDS):
            verdict = await self._decide()
            if "needs" not in verdict:
                return _report(verdict)
            self._log += verdict["needs"]
            await self._answer()
        self._dead = f"the tests ask more than {_ROUNDS} times in a row"
        return _report(await self._decide())

    async def _decide(self) -> dict[str, Any]:
        asked = {
            "tests": self._tests,
            "modules": self._modules,
            "log": self._log,
            "results": self._results,
            "dead": self._dead,
            "verdict": _VERDICT,
        }
        ended = await self._judge.exec_python(_script("inside_tests.py"), stdin=json.dumps(asked).encode())
        try:
            return json.loads(await self._judge.read(_VERDICT))
        except (OSError, ValueError):
            return {"passed": 0, "failed": [["tests", f"did not end: {_ending(ended)}"]]}

    async def _answer(self) -> None:
        """Run the code through the whole log. What it leaves unanswered, it has failed."""
        asked = {"modules": self._modules, "log": self._log, "results": _RESULTS}
        ended = await self._code.exec_python(
            _script("inside_model.py"), stdin=json.dumps(asked).encode(), **self._limits
        )
        if ended.fault == "unknown":
            raise SandboxFault("the host was too busy to run the code under test", where="code grader")
        lines = await self._told()
        first, self._results = (lines[0] if lines else None), lines[1 : len(self._log) + 1]
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
            if not isinstance(result, dict) or not {"v", "h", "e"} & result.keys():
                break
            told.append(result)
        return told


def _report(verdict: dict[str, Any]) -> TestReport:
    if "error" in verdict:
        raise RewardFault(verdict["error"], where="hidden tests", fix="mend the task's tests")
    failed = tuple(f"{check}: {why}" for check, why in verdict["failed"])
    return TestReport(passed=verdict["passed"], total=verdict["passed"] + len(failed), failures=failed)


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


def _modules(files: Mapping[str, str]) -> list[str]:
    """Importable names of the files, in order."""
    paths = [PurePosixPath(f) for f in files if f.endswith(".py")]
    names = [".".join(p.with_suffix("").parts) for p in paths if p.name != "__init__.py"]
    return [n for n in names if all(part.isidentifier() for part in n.split("."))]


def _script(name: str) -> str:
    """A program for the inside, with the codec that it shares with the outside."""
    folder = Path(__file__).parent
    return (folder / "plain.py").read_text() + "\n\n" + (folder / name).read_text()
