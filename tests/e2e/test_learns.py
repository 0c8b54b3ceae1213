"""The whole loop learns a task on a real, tiny model, and accounts for every rollout."""

import json
import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from croze.loop.ledger import SqliteLedger
from croze.loop.load import load_run
from croze.loop.start import train
from croze.loop.verbs import evaluate
from croze.sync.identity import Identity
from croze.trace.reader import TraceReader

TINY = Path(__file__).parent.parent.parent / "examples" / "tiny_calc.py"


def test_tiny_calc_learns(tmp_path: Path) -> None:
    events: list[dict] = []
    declared = load_run(TINY).override(
        {"steps": "32", "engine.threads": "1", "run.dir": str(tmp_path / "run"), "loop.eval_tasks": "24"}
    )
    result = train(declared, on_event=events.append)

    steps = [e for e in events if e["event"] == "step"]
    rewards = [e["reward_mean"] for e in steps]
    assert 0.3 <= np.mean(rewards[:5]) <= 0.65
    assert np.mean(rewards[-5:]) >= 0.82 and np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    assert {e["max_logprob_gap"] for e in steps} <= {0.0, None}
    before, after = (e for e in events if e["event"] == "eval")
    assert after["pass_at_1"] >= before["pass_at_1"]

    ledger = SqliteLedger(tmp_path / "run" / "ledger.sqlite")
    counts, commits = ledger.counts(), ledger.steps()
    ledger.close()
    assert counts.dispatched == 32 * 64 == counts.trained + counts.filtered
    assert counts.trained == 8 * sum(e["groups_trained"] for e in steps) < counts.dispatched
    assert [c.weights_id for c in commits] == [e["weights_id"] for e in steps]
    assert len({e["weights_id"] for e in steps}) == len(steps), "every step makes other weights"

    saved = load_file(result.model_dir / "model.safetensors")
    assert Identity().of(saved.items()) == result.weights_id
    assert all(t.dtype == torch.bfloat16 for t in saved.values())

    reader = TraceReader(tmp_path / "run")
    (row,) = reader.query("SELECT count(*) AS n, count(DISTINCT weights_id_last) AS ids FROM rollouts")
    assert row == {"n": 32 * 64, "ids": 32}
    (spans,) = reader.query("SELECT count(*) AS first FROM spans WHERE enabler_span_id IS NULL")
    assert spans["first"] == 1, "every span but the first knows what let it start"

    measured = evaluate(
        load_run(TINY).override({"model": str(result.model_dir), "engine.threads": "1"}), tasks=24
    )
    assert measured["weights_id"] == result.weights_id
    assert math.isclose(measured["pass_at_1"], after["pass_at_1"], abs_tol=1e-9)


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    ids = []
    for name in ("one", "two"):
        declared = load_run(TINY).override(
            {"steps": "2", "engine.threads": "1", "run.dir": str(tmp_path / name), "seed": "7"}
        )
        ids.append(train(declared).weights_id)
    assert ids[0] == ids[1]
    lines = (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
