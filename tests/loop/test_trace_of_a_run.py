"""Every column of a real run's trace holds what happened: nothing is left empty, nothing is made up."""

import json
from pathlib import Path
from typing import Any

import pytest

from croze.loop.ledger import SqliteLedger
from croze.loop.load import load_run
from croze.loop.start import train
from croze.trace.reader import TraceReader
from croze.trace.tables import schema

TASK = """
import asyncio
import croze as cz

TASKS = [{{"prompt": f"add {{a}} and {{b}}, times 3=", "n": n}}
         for n, (a, b) in enumerate([(2, 3), (14, 15), (6, 7), (18, 19), (3, 8), (5, 9), (17, 14), (9, 2), (2, 9)])]

{reward}

run = cz.Run(model="tiny-calc", tasks=TASKS, reward=judged, steps=2, groups_per_step=4, group_size=4,
             sampling=cz.Sampling(max_tokens=8), optim=cz.Optim(lr=3e-4), loop=cz.LoopOptions(retries=1),
             engine=cz.EngineOptions(threads=1, max_rows=8), reward_options=cz.RewardOptions(concurrency=2))
"""
BY_TURN = """
TRIED = set()

async def judged(reply, rollout):
    await asyncio.sleep(0.01)
    if rollout.group_id == "g1" and rollout.attempt == 0:
        raise RuntimeError("once")
    if rollout.id == "g2.3.0":
        return cz.Outcome(valid=False, message="not applicable")
    length = len(reply) % 4 / 4
    return cz.Outcome(score=length, parts={"length": length}, turns=({"length": length, "asked": 1.0}, {}))
"""
TOGETHER = """
def judged(completions, n):
    assert n == n[:1] * len(completions), "siblings, and they alone"
    return [len(c) % 4 / 4 for c in completions]
"""
SYNC_BYTES = 1_607_936
"""The published tensors of tiny-calc: 803,968 parameters in bfloat16."""
SOMETIMES = {
    "spans": {"enabler_span_id", "enabler_type", "rollout_id"},
    "rollouts": {"score", "max_gap", "advantage"},
    "tokens": {"logprob", "weights_id"},
}
"""Columns that are null where there is nothing to tell."""
SINGLE_TURN = {"turns"}
"""Columns that only runs of another kind vary."""
WORK_OF = {
    "tokens": {"decode", "train", "eval"},
    "bytes": {"sync"},
    "rollouts": {"decode", "reward", "train", "save", "eval"},
}


class Traced:
    """A finished run: its events, its ledger, and rows of its trace by table."""

    def __init__(self, folder: Path, reward: str, **words: str) -> None:
        (folder / "task.py").write_text(TASK.format(reward=reward))
        self.events: list[dict[str, Any]] = []
        declared = load_run(folder / "task.py").override({"run.dir": str(folder / "run"), **words})
        train(declared, on_event=self.events.append)
        self.steps = [e for e in self.events if e["event"] == "step"]
        with TraceReader(folder / "run") as reader:
            self.tables = {
                name: reader.query(f"SELECT * FROM {name}") for name in ("spans", "rollouts", "tokens")
            }
        ledger = SqliteLedger(folder / "run" / "ledger.sqlite")
        self.ledger = {entry.rollout_id: entry for entry in ledger.rollouts()}
        ledger.close()
        self.by_id = {s["span_id"]: s for s in self.tables["spans"]}

    def spans(self, *staves: str, step: int | None = None) -> list[dict[str, Any]]:
        return [s for s in self.tables["spans"] if s["stave"] in staves and step in (None, s["step"])]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return Traced(tmp_path_factory.mktemp("by-turn"), BY_TURN, **{"loop.eval_tasks": "2"})


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    words = {"reward.concurrency": "1", "engine.max_rows": "256", "optim.minibatches": "2"}
    return Traced(tmp_path_factory.mktemp("together"), TOGETHER, **words)


@pytest.mark.parametrize("table", ["spans", "rollouts", "tokens"])
def test_no_column_is_left_empty_or_always_the_same(traced: Traced, table: str) -> None:
    rows = traced.tables[table]
    if table != "tokens":
        assert list(rows[0]) == schema(table).names
    for column in rows[0]:
        values = [row[column] for row in rows]
        if column not in SOMETIMES[table]:
            assert None not in values, column
        assert column in SINGLE_TURN or len({repr(v) for v in values}) > 1, (
            f"{column} is {values[0]!r} in every row"
        )


def test_spans_follow_from_each_other(traced: Traced) -> None:
    allowed = {
        "eval": {"sync": "version", "save": "gate"},
        "decode": {"eval": "gate", "save": "gate", "reward": "data", "decode": "resource"},
        "reward": {"decode": "data", "reward": "resource"},
        "train": {"reward": "data"},
        "sync": {"train": "data"},
        "save": {"sync": "data"},
    }
    first, *rest = sorted(traced.tables["spans"], key=lambda s: s["t_start"])
    assert (first["stave"], first["step"], first["enabler_span_id"]) == ("sync", 0, None)
    for span in rest:
        enabler = traced.by_id[span["enabler_span_id"]]
        assert span["enabler_type"] == allowed[span["stave"]][enabler["stave"]]
        assert enabler["t_end"] <= span["t_start"] + 0.25, "what enables has ended"
        if span["enabler_type"] == "data" and span["stave"] == "reward":
            assert enabler["rollout_id"] == span["rollout_id"]
    for span in traced.tables["spans"]:
        assert span["t_request"] <= span["t_start"] <= span["t_end"]


def test_the_chain_of_enablers_covers_the_run(traced: Traced) -> None:
    """Walking back from the end, nothing but moments is unexplained (a hole would hide a stave from what-if)."""
    span = max(traced.tables["spans"], key=lambda s: s["t_end"])
    end, gaps = span["t_end"], 0.0
    while span["enabler_span_id"] is not None:
        enabler = traced.by_id[span["enabler_span_id"]]
        gaps += max(0.0, span["t_start"] - enabler["t_end"])
        span = enabler
    assert span["stave"] == "sync" and span["step"] == 0
    assert gaps < 0.2 * (end - span["t_start"])


def test_work_adds_up_to_what_the_steps_told(traced: Traced) -> None:
    for event in traced.steps:
        step = event["step"]
        decode, reward = traced.spans("decode", step=step), traced.spans("reward", step=step)
        rollouts = [r for r in traced.tables["rollouts"] if r["step"] == step]
        assert sum(s["tokens"] for s in decode) == event["tokens"]
        assert sum(s["rollouts"] for s in decode) == sum(s["rollouts"] for s in reward) == len(rollouts)
        assert {s["rollout_id"] for s in decode} == {r["rollout_id"] for r in rollouts}
        (train,), (sync,), (save,) = (traced.spans(stave, step=step) for stave in ("train", "sync", "save"))
        assert train["tokens"] == event["tokens_computed"]
        assert train["rollouts"] == sum(r["advantage"] is not None for r in rollouts) > 0
        assert sync["bytes"] == SYNC_BYTES and save["rollouts"] == len(rollouts)
        for span in (train, sync, save):
            took = event["phase_s"][span["stave"]]
            assert span["t_end"] - span["t_start"] == pytest.approx(took, abs=1e-5)
    for name, staves in WORK_OF.items():
        assert {s["stave"] for s in traced.tables["spans"] if s[name]} == staves
    assert [s["rollouts"] for s in traced.spans("eval")] == [2, 2]
    roles = {s["stave"]: s["role"] for s in traced.tables["spans"]}
    assert (roles["decode"], roles["reward"], roles["train"]) == ("engine", "reward", "trainer")


def test_what_shared_a_stave_and_what_waited_for_it(traced: Traced, together: Traced) -> None:
    """Eight rows and two reward calls at once: no more than that ran, and the rest waited."""
    assert {s["concurrency"] for s in traced.spans("train", "sync", "save", "eval")} == {1.0}
    for step in (1, 2):
        decode, reward = traced.spans("decode", step=step), traced.spans("reward", step=step)
        assert 4 < max(s["concurrency"] for s in decode) < 12
        assert 1 < max(s["concurrency"] for s in reward) <= 2.05
        waited = [s for s in decode if s["enabler_type"] == "resource"]
        assert len(waited) >= 8 and all(s["t_start"] - s["t_request"] > 0.001 for s in waited)
        queued = [s for s in reward if s["enabler_type"] == "resource"]
        assert queued and all(s["t_start"] > s["t_request"] for s in queued)
    # all sixteen at once, each group's reward after the one before
    for step in (1, 2):
        decode, reward = together.spans("decode", step=step), together.spans("reward", step=step)
        assert {s["enabler_type"] for s in decode} == {"version" if step == 1 else "gate"}
        assert max(s["concurrency"] for s in decode) > 8
        assert [s["rollouts"] for s in reward] == [4] * 4
        assert all(1.0 <= s["concurrency"] <= 1.05 for s in reward)
        last = {s["rollout_id"][:-4]: s["t_end"] for s in sorted(decode, key=lambda s: s["t_end"])}
        asked = {s["rollout_id"][:-4]: s["t_request"] for s in reward}
        assert asked == pytest.approx(last, abs=1e-5), "a group is judged once its last sibling has ended"


def test_rollouts_tell_what_the_ledger_and_the_reward_know(traced: Traced) -> None:
    rows = {r["rollout_id"]: r for r in traced.tables["rollouts"]}
    assert rows.keys() == traced.ledger.keys()
    for name, row in rows.items():
        entry = traced.ledger[name]
        facts = (
            "group_id",
            "member",
            "attempt",
            "step",
            "task_id",
            "prompt_tokens",
            "generated_tokens",
            "score",
        )
        assert {f: row[f] for f in facts} == {f: getattr(entry, f) for f in facts}
        assert row["weights_id_last"] == row["weights_id_first"] == entry.weights_id
        assert (row["advantage"] is not None) == (entry.state == "trained")
        assert row["max_gap"] == (0.0 if entry.state == "trained" else None)
        parts = json.loads(row["parts"])
        if row["valid"]:
            assert row["turn_parts"] == [{"length": row["score"], "asked": 1.0}, {}]
            assert parts == {"length": row["score"]}
        else:
            assert (row["score"], row["turn_parts"], parts) == (None, [], {})
    once = [r for r in rows.values() if r["group_id"] == "g1" and r["attempt"] == 0]
    assert len(once) == 4 and all(r["fault"] != "none" and "once" in r["message"] for r in once)
    broken = {s["rollout_id"] for s in traced.spans("reward") if not s["ok"]}
    assert broken == {r["rollout_id"] for r in once}
    assert [r["message"] for r in rows.values() if not r["valid"] and r["fault"] == "none"] == [
        "not applicable"
    ]


def test_tokens_spell_the_rollouts(traced: Traced) -> None:
    rows = {r["rollout_id"]: r for r in traced.tables["rollouts"]}
    assert {t["rollout_id"] for t in traced.tables["tokens"]} == rows.keys()
    for name, row in rows.items():
        tokens = [t for t in traced.tables["tokens"] if t["rollout_id"] == name]
        assert sum(t["mask"] for t in tokens) == row["generated_tokens"]
        said = "".join(t["text"] for t in tokens if t["producer"] == "model")
        assert said.startswith(row["reply"]) and row["prompt"] in "".join(t["text"] for t in tokens)
        for t in tokens:
            sampled = t["producer"] == "model"
            assert (t["logprob"] is not None) == (t["weights_id"] is not None) == t["mask"] == sampled


def test_the_gap_of_every_rollout_is_measured_before_the_first_update(together: Traced) -> None:
    """With two optimizer batches a step, the second one's own log-probs come after an update."""
    assert all(e["lr"] for e in together.steps) and any(e["grad_norm"] for e in together.steps)
    trained = [r for r in together.tables["rollouts"] if r["advantage"] is not None]
    assert len(trained) > 8 and {r["max_gap"] for r in trained} == {0.0}
