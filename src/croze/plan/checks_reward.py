"""The reward on replies that every run meets: a right one, none, nonsense, a very long one, all of Unicode."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from croze.plan.checks import Context, Report, finish
from croze.plan.machine import memory_available
from croze.plan.probing import PROCESSES, Allowed, Probe, Trial, Tried, try_reward
from croze.reward.call import inspect_reward
from croze.run import Run, provenance
from croze.types import Task

PATIENCE_S = 10.0
"""Seconds a call may take here where the run sets no reward.timeout_s of its own; as much at most of what it sets:"""
MOST_PATIENCE_S = 60.0
TOTAL_S = 45.0
"""No new call after so many seconds."""
LEAST_MEMORY = 1 << 30
GARBAGE = "qzx 7#! kv"
UNICODE = "𝔘nïcödé 日本語 العربية 🦾👩‍🚀 e\u0301 \u202e\u200b\u00a0\ufffd ½ «»"
LONG = "So the answer may be 7, or 8, or (9 * 3) and so on. " * 1000
DRESSES = ("\\boxed{{{}}}", "#### {}", "<answer>{}</answer>", "The answer is {}.")
"""How rewards want an answer to be written, if not bare."""
DRESSED = "gold in other words"
MESSAGE = 200
_PLACE = re.compile(r"\A(?P<text>.*) \((?P<place>[^\n]+:\d+)\)\Z", re.DOTALL)
_OWN_FOLDER = str(Path(__file__).resolve().parents[1])


def look_at_reward(context: Context, report: Report) -> None:
    """Call the reward in a process of its own, under limits, and look at what it gives."""
    run = context.run
    probes = _probes(context.tasks)
    trial = finish(try_reward(run, probes, allowed(run)))
    _report_faults(run, trial, report)
    _report_leftovers(run, trial, report)
    if report.status == "fail":
        return
    if len(trial.tried) < len(probes):
        report.warn(
            "reward.slow",
            f"only {len(trial.tried)} of {len(probes)} calls were made within {TOTAL_S:g} s",
            where="reward",
            fix="a run makes groups_per_step x group_size calls a step, reward.concurrency at once",
        )
    _report_scores(run, trial, report)
    if not report.findings:
        slowest = max(t.seconds for t in trial.tried)
        report.ok(f"finite, the same twice, not all equal: {_told(trial)}; at most {slowest:.2f} s a call")


def allowed(run: Run) -> Allowed:
    """Limits of the trial: half the memory at hand, the declared time-out where there is one."""
    timeout, source = provenance(run)["reward.timeout_s"]
    patience = min(timeout, PATIENCE_S if source == "default" else MOST_PATIENCE_S)
    sandboxes = 2 * run.sandbox.pids if inspect_reward(run.reward).needs_sandbox else 0
    return Allowed(
        call_s=patience,
        total_s=TOTAL_S,
        memory_bytes=max(LEAST_MEMORY, memory_available() // 2),
        processes=PROCESSES + sandboxes,
    )


def _probes(tasks: Sequence[Task]) -> list[Probe]:
    """Gold first, of the first task that has an answer; the plain ones come twice."""
    task = next((t for t in tasks if _gold(t) is not None), tasks[0])
    gold = _gold(task)
    plain = {} if gold is None else {"gold": gold}
    plain |= {"empty": "", "garbage": GARBAGE, "long": LONG, "unicode": UNICODE}
    dressed = [] if gold is None else [dress.format(gold) for dress in DRESSES]
    once = [Probe(name=name, reply=reply, task=task) for name, reply in plain.items()]
    return [*once, *(Probe(name=DRESSED, reply=reply, task=task) for reply in dressed), *once]


def _gold(task: Task) -> str | None:
    answer = task.columns.get("answer")
    return None if answer is None or isinstance(answer, list | dict | bool) else str(answer)


# ------------------------------------------------------------------------------------------------- faults


def _report_faults(run: Run, trial: Trial, report: Report) -> None:
    """Calls that gave no outcome, those with the same end together."""
    ends: dict[tuple[str, str], list[Tried]] = defaultdict(list)
    for tried in trial.tried:
        if tried.broke or tried.outcome.fault != "none":
            text, where = _split(run, tried.broke or tried.outcome.message)
            ends[text.partition(":")[0], where].append(tried)
    for (_, where), group in ends.items():
        first = group[0]
        names = ", ".join(dict.fromkeys(t.probe.name for t in group))
        text, name = _split(run, first.outcome.message)[0], inspect_reward(run.reward).name
        if first.broke:
            text = f"{name} {first.broke}, and was killed"
        elif first.late:
            text = f"{name} gave nothing within {allowed(run).call_s:g} s"
        if first.late and _is_declared_slow(run):
            report.warn(
                "reward.slow", f"on a reply that is {names}: {text}", where=where, fix=_fix(run, first)
            )
            continue
        report.fail(
            "reward", f"on a reply that is {names}: {_short(text)}", where=where, fix=_fix(run, first)
        )


def _split(run: Run, message: str) -> tuple[str, str]:
    """A worker's words about an error, and the place in the user's file; the reward's own where it names ours."""
    home = f"{inspect.unwrap(run.reward).__code__.co_filename}:{inspect.unwrap(run.reward).__code__.co_firstlineno}"
    found = _PLACE.match(message)
    if found is None:
        return message, home
    place = found["place"]
    return found["text"].removeprefix("RewardFault: "), home if place.startswith(_OWN_FOLDER) else place


def _short(text: str) -> str:
    return text if len(text) <= MESSAGE else text[: MESSAGE - 1] + "…"


def _fix(run: Run, tried: Tried) -> str:
    message, limit = tried.outcome.message, allowed(run).call_s
    if tried.broke:
        return "let it use less: in a run, rewards share this machine with the model and with each other"
    if tried.late and _is_declared_slow(run):
        return (
            f"a run waits reward.timeout_s={run.reward_options.timeout_s:g}; check waits no longer than this"
        )
    if tried.late:
        return (
            f"let it end within {limit:g} s; if it is only slow, say so: reward.timeout_s={_slower(limit):g}"
            f" (check then waits as long, up to {MOST_PATIENCE_S:g} s)"
        )
    if message.startswith("RewardFault"):
        return "return a finite number, a dict of named finite numbers, cz.Outcome, or None"
    if "worker" in message:
        return "a reward must return: it may not end its process"
    return "catch what a wrong reply makes it raise, and give that reply a low score"


def _is_declared_slow(run: Run) -> bool:
    """Whether a call that took longer than check waits may still be in time for the run."""
    timeout, source = provenance(run)["reward.timeout_s"]
    return source != "default" and timeout > MOST_PATIENCE_S


def _slower(limit: float) -> float:
    return 30.0 if limit < 30 else 2 * limit


def _report_leftovers(run: Run, trial: Trial, report: Report) -> None:
    """Processes that the reward started and that outlived the call."""
    first, last = trial.left
    name = inspect_reward(run.reward).name
    _, where = _split(run, "")
    fix = "end what a call starts before it returns (subprocess.run, not Popen; no os.fork)"
    if last > first:
        text = f"{name} forks: {last} processes are left after {len(trial.tried)} calls, more with every call"
        report.fail("reward", text, where=where, fix=fix)
    elif last:
        text = f"{name} leaves {last} processes running after its calls"
        report.warn("reward.processes", text, where=where, fix=fix)


# ------------------------------------------------------------------------------------------------- scores


def _report_scores(run: Run, trial: Trial, report: Report) -> None:
    """Whether the scores could teach: told apart, the same twice, the right reply above the wrong ones."""
    _, where = _split(run, "")
    tried = [t for t in trial.tried if t.outcome.valid]
    if not tried:
        report.warn(
            "reward.none",
            "the reward returned None (not applicable) for every reply",
            where=where,
            fix="return a number: replies without one are left out",
        )
        return
    by_reply: dict[str, list[Tried]] = defaultdict(list)
    for t in tried:
        by_reply[t.probe.reply].append(t)
    shaky = next((twice for twice in by_reply.values() if len({t.outcome.score for t in twice}) > 1), None)
    if shaky:
        report.warn(
            "reward.random",
            f"the same reply ({shaky[0].probe.name}) got {' and '.join(f'{t.outcome.score:g}' for t in shaky)}",
            where=where,
            fix="seed what is random; else a resumed run does not give the same bytes",
        )
    if len({t.outcome.score for t in tried}) == 1:
        report.warn(
            "reward.flat",
            f"every reply got {tried[0].outcome.score:g}: {', '.join(dict.fromkeys(t.probe.name for t in tried))}",
            where=where,
            fix="a reward teaches only where siblings differ: give parts of the score for parts of the answer",
        )
        return
    _report_gold(tried, where, report)


def _report_gold(tried: list[Tried], where: str, report: Report) -> None:
    gold = [t for t in tried if t.probe.name in ("gold", DRESSED)]
    wrong = [t for t in tried if t.probe.name in ("garbage", "empty")]
    if not gold or not wrong:
        return
    best, other = max(t.outcome.score for t in gold), max(wrong, key=lambda t: t.outcome.score)
    if best <= other.outcome.score:
        report.warn(
            "reward.gold",
            f"the task's own answer {gold[0].probe.reply!r:.60} gets {best:g} at best, a reply that is"
            f" {other.probe.name} {other.outcome.score:g}",
            where=where,
            fix="see that the reward reads the answer column, and how it wants an answer to be written",
        )


def _told(trial: Trial) -> str:
    """The score of every kind of reply; of the gold ones the best."""
    best: dict[str, float] = {}
    for t in trial.tried:
        if t.outcome.valid:
            name = "gold" if t.probe.name == DRESSED else t.probe.name
            best[name] = max(best.get(name, t.outcome.score), t.outcome.score)
    return ", ".join(f"{name} {score:g}" for name, score in best.items())
