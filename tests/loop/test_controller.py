"""The loop with a real model, a real reward process and real faults: nothing lost, no fault scored."""

import json
from pathlib import Path

import pytest

from croze.errors import RewardFault, UsageError
from croze.loop.ledger import SqliteLedger
from croze.loop.load import load_run, load_trained
from croze.loop.start import train
from croze.loop.verbs import evaluate

TASK = """
import os
import croze as cz
from croze.reward.expression import evaluate

TASKS = [{{"prompt": f"add {{a}} and {{b}}, times 3=", "answer": str((a + b) * 3), "n": n}}
         for n, (a, b) in enumerate([(2, 3), (4, 5), (6, 7), (8, 9), (3, 8), (5, 9), (7, 4), (9, 2)])]

{reward}

run = cz.Run(model="tiny-calc", tasks=TASKS, reward=judged, steps={steps}, groups_per_step=4, group_size=4,
             sampling=cz.Sampling(max_tokens=12), optim=cz.Optim(lr=3e-4), engine=cz.EngineOptions(threads=1),
             loop=cz.LoopOptions(retries=1), reward_options=cz.RewardOptions(timeout_s=3.0))
"""
SCORED = "1.0 if str(evaluate(reply)) == answer else 0.1 * (evaluate(reply) is not None)"
FAULTY = {
    "raises": f"def judged(reply, answer, n):\n    assert n != 2, 'the judge broke'\n    return {SCORED}",
    "dies": f"def judged(reply, answer, n):\n    if n == 2: os._exit(9)\n    return {SCORED}",
    "not a number": f"def judged(reply, answer, n):\n    return float('nan') if n == 2 else {SCORED}",
}


def run_of(tmp_path: Path, reward: str, steps: int = 2, **words: str):
    file = tmp_path / "task.py"
    file.write_text(TASK.format(reward=reward, steps=steps))
    return load_run(file).override({"run.dir": str(tmp_path / "run"), **words})


@pytest.mark.parametrize("fault", FAULTY)
def test_a_fault_of_the_reward_is_retried_then_leaves_the_statistics(fault: str, tmp_path: Path) -> None:
    events: list[dict] = []
    train(run_of(tmp_path, FAULTY[fault]), on_event=events.append)

    steps = [e for e in events if e["event"] == "step"]
    ledger = SqliteLedger(tmp_path / "run" / "ledger.sqlite")
    counts, rows = ledger.counts(), ledger.rollouts()
    ledger.close()
    # eight tasks over two steps: one task's four rollouts fail, are tried once more, and fail again
    assert counts.dispatched == 2 * 16 + 4 and counts.failed == 8 and counts.in_flight == 0
    assert sum(e["infra_faults"] for e in steps) == 8
    failed = [r for r in rows if r.state == "failed"]
    assert len({(r.group_id, r.member) for r in failed}) == 4 and {r.attempt for r in failed} == {0, 1}
    assert all(r.score is None for r in failed), "no fault is ever a reward"
    assert not any(r.state == "trained" and r.group_id == failed[0].group_id for r in rows)
    assert [e["valid"] for e in steps].count(1.0) == 1
    told = [json.loads(line) for line in (tmp_path / "run" / "faults.jsonl").read_text().splitlines()]
    assert len(told) == 8 and {t["fault"] for t in told} <= {"infra", "unknown"}
    assert all(t["message"] for t in told)


def test_a_reward_that_never_works_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    declared = run_of(tmp_path, "def judged(reply):\n    raise RuntimeError('no judge today')")
    with pytest.raises(RewardFault, match=r"all .* of step 1 met a fault.*no judge today"):
        train(declared)
    ledger = SqliteLedger(tmp_path / "run" / "ledger.sqlite")
    assert ledger.counts().in_flight == 0 and ledger.counts().trained == 0
    ledger.close()


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    events: list[dict] = []
    train(run_of(tmp_path, "def judged(reply):\n    return 1.0", steps=1), on_event=events.append)
    (step,) = [e for e in events if e["event"] == "step"]
    assert step["groups_trained"] == 0 and step["reward_mean"] == 1.0
    assert [step[name] for name in ("max_logprob_gap", "kl_rollout", "loss")] == [None] * 3


def test_an_interrupt_anywhere_leaves_nothing_in_flight(tmp_path: Path) -> None:
    def interrupt(event: dict) -> None:
        if event["event"] == "step":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run_of(tmp_path, f"def judged(reply, answer):\n    return {SCORED}"), on_event=interrupt)
    ledger = SqliteLedger(tmp_path / "run" / "ledger.sqlite")
    counts = ledger.counts()
    ledger.close()
    assert counts.in_flight == 0 and counts.trained + counts.filtered == 16


def test_an_adapter_is_evaluated_on_its_base(tmp_path: Path) -> None:
    reward = f"def judged(reply, answer):\n    return {SCORED}"
    result = train(run_of(tmp_path, reward, **{"lora.rank": "4", "lora.alpha": "8"}))
    measured = evaluate(load_trained(tmp_path / "run"), tasks=4, samples=2)
    assert measured["weights_id"] == result.weights_id
    assert 0 <= measured["low_at_2"] <= measured["pass_at_2"] <= measured["high_at_2"] <= 1


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ({"group_size": "1"}, "group_size"),
        ({"optim.minibatches": "5"}, "optim.minibatches"),
        ({"lora.rank": "4", "lora.targets": "foo"}, "lora.targets"),
        ({"lora.rank": "4", "lora.alpha": "nan"}, "lora.alpha"),
        ({"name": "../../evil"}, "name"),
        ({"run.dir": "/proc/no/such"}, "run.dir"),
        ({"seed": "-1"}, "seed"),
        ({"sampling.top_p": "0"}, "sampling.top_p"),
    ],
    ids=lambda value: str(value),
)
def test_what_could_never_learn_is_refused_before_it_starts(words: dict, key: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        train(run_of(tmp_path, f"def judged(reply, answer):\n    return {SCORED}", **words))
    assert refused.value.where == key and (refused.value.fix or "must be" in refused.value.message)


@pytest.mark.parametrize(
    "words",
    [
        {"lora.rank": "4"},
        {"algo.name": "rloo"},
        {"algo.name": "reinforce++"},
        {"algo.name": "gspo", "algo.normalizer": "sequence"},
        {"algo.name": "cispo", "optim.minibatches": "2"},
        {"algo.kl": "0.01", "algo.entropy": "0.001"},
        {"algo.anchor": "recomputed", "algo.importance": "truncate", "sampling.temperature": "0.8"},
        {"optim.checkpointing": "true", "optim.tokens_per_microbatch": "64"},
        {"optim.share_prompt": "false", "optim.schedule": "cosine", "optim.warmup_steps": "1"},
        {"sync.dtype": "float32", "lora.rank": "2", "algo.kl": "0.01"},
    ],
    ids=lambda words: ",".join(words),
)
def test_every_way_to_train_runs_and_stays_exact(words: dict[str, str], tmp_path: Path) -> None:
    events: list[dict] = []
    reward = f"def judged(reply, answer):\n    return {SCORED}"
    result = train(run_of(tmp_path, reward, **words), on_event=events.append)
    steps = [e for e in events if e["event"] == "step"]
    assert {e["max_logprob_gap"] for e in steps} <= {0.0, None}
    assert any(e["grad_norm"] for e in steps) and result.model_dir.is_dir()
    assert len({e["weights_id"] for e in steps}) == 2


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    declared = run_of(tmp_path, f"def judged(reply, answer):\n    return {SCORED}", steps=1)
    train(declared)
    with pytest.raises(UsageError, match="already holds a run"):
        train(declared)
