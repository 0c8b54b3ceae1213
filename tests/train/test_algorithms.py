"""What must hold for every algorithm whatever the data: invariances, who counts, and what is refused."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import numpy as np
import pytest
from algorithm_cases import Case, evaluate, make_group, make_rollout, random_case
from hypothesis import given, settings
from hypothesis import strategies as st

from croze.config import Algo, Sampling
from croze.errors import ConfigError, InvariantViolated
from croze.train.advantages import batch_normalised, group_relative, leave_one_out
from croze.train.algorithms import PolicyGradient, build
from croze.train.normalizers import token_weights
from croze.types import Batch, Group, Outcome, Rollout, Sample

ALGOS = {
    "grpo": Algo(normalizer="sequence"),
    "dr_grpo": Algo(advantage_std=False, normalizer="constant"),
    "dapo": Algo(),
    "grpo_kl_entropy": Algo(kl=0.1, entropy=0.01),
    "grpo_truncate": Algo(anchor="recomputed", importance="truncate", importance_cap=1.1),
    "rloo": Algo(name="rloo"),
    "reinforce++": Algo(name="reinforce++"),
    "reinforce++_baseline": Algo(name="reinforce++", group_baseline=True),
    "gspo": Algo(name="gspo", normalizer="sequence", clip_low=0.05, clip_high=0.07),
    "gspo_mask": Algo(name="gspo", anchor="recomputed", importance="mask", importance_cap=1.02),
    "cispo": Algo(name="cispo"),
}
names = st.sampled_from(sorted(ALGOS))
seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=40, deadline=None)


def make(name: str, *, minibatches: int = 1, **changes: object) -> PolicyGradient:
    algo = dataclasses.replace(ALGOS[name], **changes)  # type: ignore[arg-type]
    return build(algo, Sampling(max_tokens=16), minibatches=minibatches)


def one(batches: list[Batch]) -> Batch:
    (batch,) = batches
    return batch


def same_samples(left: Batch, right: Batch) -> None:
    assert msgspec.json.encode([_plain(s) for s in left.samples]) == msgspec.json.encode(
        [_plain(s) for s in right.samples]
    )


def _plain(sample: Sample) -> dict[str, object]:
    fields = msgspec.structs.asdict(sample)
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in fields.items()}


def with_rollout(case: Case, rollout: Rollout) -> list[Group]:
    groups = []
    for group in case.groups:
        more = (rollout,) if group.id == rollout.group_id else ()
        groups.append(msgspec.structs.replace(group, rollouts=group.rollouts + more))
    return groups


# --- invariances -------------------------------------------------------------------------------------------


@quick
@given(names, seeds, st.data())
def test_any_split_into_microbatches_gives_the_same_loss_and_gradient(name, seed, data) -> None:
    case, algorithm = random_case(seed), make(name)
    batch = one(algorithm.minibatches(case.groups, 1))
    count = len(batch.samples)
    homes = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    splits = [[i for i, home in enumerate(homes) if home == part] for part in range(4)]
    whole, cut = evaluate(algorithm, batch, case), evaluate(algorithm, batch, case, splits)
    scale = sum(float(np.abs(s.weights_S * s.advantages_S).sum()) for s in batch.samples) or 1.0
    assert abs(whole.loss - cut.loss) <= max(1e-6 * abs(whole.loss), 1e-12 * scale)
    assert whole.gradients.keys() == cut.gradients.keys()
    for rollout_id, gradient in whole.gradients.items():
        np.testing.assert_allclose(cut.gradients[rollout_id], gradient, rtol=1e-6, atol=0)
    for figure, value in whole.figures.items():
        assert cut.figures[figure] == pytest.approx(value, rel=1e-9, abs=1e-9)


@quick
@given(names, seeds, st.integers(1, 3))
def test_the_order_of_arrival_changes_nothing(name, seed, minibatches) -> None:
    case, algorithm, rng = random_case(seed), make(name, minibatches=minibatches), random.Random(seed)
    shuffled = [
        msgspec.structs.replace(g, rollouts=tuple(rng.sample(g.rollouts, len(g.rollouts))))
        for g in rng.sample(case.groups, len(case.groups))
    ]
    left, right = algorithm.minibatches(case.groups, 1), algorithm.minibatches(shuffled, 1)
    assert [b.stats for b in left] == [b.stats for b in right]
    for a, b in zip(left, right, strict=True):
        same_samples(a, b)


@quick
@given(names, seeds)
def test_a_group_is_its_id_not_its_place(name, seed) -> None:
    """A group that comes in two pieces, its members in between those of others, is one group."""
    case, algorithm = random_case(seed), make(name)
    pieces = [
        msgspec.structs.replace(g, rollouts=g.rollouts[half::2])
        for half in (1, 0)
        for g in reversed(case.groups)
    ]
    whole, cut = one(algorithm.minibatches(case.groups, 1)), one(algorithm.minibatches(pieces, 1))
    same_samples(whole, cut)
    assert whole.stats == cut.stats


@quick
@given(st.sampled_from(["grpo", "rloo", "gspo", "cispo"]), seeds)
def test_partial_groups_never_mix_their_statistics(name, seed) -> None:
    """Strides over partial groups would compare attempts at different tasks; a group stands for itself."""
    case, algorithm = random_case(seed, invalid=0.4), make(name, skip_zero_advantage=False)
    together = one(algorithm.minibatches(case.groups, 1))
    alone = [s for g in case.groups for s in one(algorithm.minibatches([g], 1)).samples]
    assert {s.rollout_id: s.advantages_S.tolist() for s in together.samples} == {
        s.rollout_id: s.advantages_S.tolist() for s in alone
    }


@quick
@given(names, seeds, st.floats(-5, 5))
def test_an_invalid_rollout_changes_nothing(name, seed, score) -> None:
    case, algorithm = random_case(seed), make(name)
    bad = make_rollout("g1", 99, mask=(True,) * 5)
    bad = bad.judged(Outcome(score=score, valid=False, fault="infra"))
    before = one(algorithm.minibatches(case.groups, 1))
    after = one(algorithm.minibatches(with_rollout(case, bad), 1))
    same_samples(before, after)
    assert after.stats == before.stats | {"rollouts_invalid": before.stats["rollouts_invalid"] + 1}
    unjudged = msgspec.structs.replace(bad, outcome=None)
    same_samples(before, one(algorithm.minibatches(with_rollout(case, unjudged), 1)))


@quick
@given(names, seeds, st.data(), st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_a_masked_token_changes_nothing_whatever_it_holds(name, seed, data, poison) -> None:
    case, algorithm = random_case(seed), make(name)
    before = evaluate(algorithm, one(algorithm.minibatches(case.groups, 1)), case)
    target = data.draw(st.sampled_from(case.rollouts))
    cut, length = target.prompt_tokens, len(target.ids_T) - target.prompt_tokens
    place = data.draw(st.integers(0, length))
    longer = msgspec.structs.replace(
        target,
        ids_T=np.insert(target.ids_T, cut + place, 7),
        mask_T=np.insert(target.mask_T, cut + place, False),
        logprobs_T=np.insert(target.logprobs_T, cut + place, np.float32(poison)),
    )
    grown = Case(groups=[_swap(g, longer) for g in case.groups])
    for field in ("current", "anchor", "reference", "entropy"):
        arrays = dict(getattr(case, field))
        arrays[target.id] = np.insert(arrays[target.id], place, np.float32(poison))
        setattr(grown, field, arrays)
    after = evaluate(algorithm, one(algorithm.minibatches(grown.groups, 1)), grown)
    assert after.loss == pytest.approx(before.loss, rel=1e-9, abs=1e-12)
    for rollout_id, gradient in before.gradients.items():
        got = after.gradients[rollout_id]
        if rollout_id == target.id:
            assert got[place] == 0.0
            got = np.delete(got, place)
        np.testing.assert_allclose(got, gradient, rtol=1e-6, atol=0)


def _swap(group: Group, rollout: Rollout) -> Group:
    return msgspec.structs.replace(
        group, rollouts=tuple(rollout if r.id == rollout.id else r for r in group.rollouts)
    )


@quick
@given(names, seeds, st.floats(-1e3, 1e3))
def test_equal_rewards_give_no_gradient(name, seed, score) -> None:
    case, algorithm = random_case(seed), make(name, kl=0.0, entropy=0.0, skip_zero_advantage=False)
    case.groups = [
        msgspec.structs.replace(g, rollouts=tuple(r.judged(Outcome(score=score)) for r in g.rollouts))
        for g in case.groups
    ]
    result = evaluate(algorithm, one(algorithm.minibatches(case.groups, 1)), case)
    assert result.loss == 0.0
    assert result.gradients and not any(g.any() for g in result.gradients.values())
    skipping = make(name, kl=0.0, entropy=0.0)
    batch = one(skipping.minibatches(case.groups, 1))
    assert not batch.samples and batch.stats["tokens"] == batch.stats["tokens_skipped"] > 0


@quick
@given(names, seeds, st.integers(1, 3))
def test_skipping_saves_work_and_nothing_else(name, seed, minibatches) -> None:
    case = random_case(seed)
    flat = make_group("g2x", [0.5, 0.5, 0.5], mask=(True, False, True))
    case.groups.append(flat)
    for r in flat.rollouts:
        for arrays in (case.current, case.anchor, case.reference, case.entropy):
            arrays[r.id] = np.full(3, -0.9, np.float32)
    on = make(name, minibatches=minibatches)
    off = make(name, minibatches=minibatches, skip_zero_advantage=False)
    for left, right in zip(on.minibatches(case.groups, 1), off.minibatches(case.groups, 1), strict=True):
        a, b = evaluate(on, left, case), evaluate(off, right, case)
        assert a.loss == pytest.approx(b.loss, rel=1e-9, abs=1e-12)
        for rollout_id, gradient in b.gradients.items():
            np.testing.assert_array_equal(a.gradients.get(rollout_id, np.zeros_like(gradient)), gradient)
        assert left.stats["tokens"] == right.stats["tokens"]
        assert right.stats["groups_skipped"] == right.stats["tokens_skipped"] == 0
    kept = {s.rollout_id for b in on.minibatches(case.groups, 1) for s in b.samples}
    still_needed = on.needs_reference or on.needs_entropy or name == "reinforce++"
    assert {r.id for r in flat.rollouts} <= kept if still_needed else not {r.id for r in flat.rollouts} & kept


# --- the maths of advantages and normalisers ---------------------------------------------------------------

score_lists = st.lists(st.integers(-1000, 1000), min_size=2, max_size=12).map(lambda xs: np.array(xs) / 100)


@given(score_lists, st.floats(1e-3, 1e3), st.floats(-1e3, 1e3))
def test_advantages_are_affine_as_the_formulas_say(scores, scale, shift) -> None:
    moved = scores * scale + shift
    np.testing.assert_allclose(
        group_relative(moved, std=True), group_relative(scores, std=True), rtol=1e-6, atol=1e-6
    )
    for centred in (lambda r: group_relative(r, std=False), leave_one_out):
        np.testing.assert_allclose(centred(moved), scale * centred(scores), rtol=1e-6, atol=1e-6 * scale)
    for baseline in (False, True):
        before = batch_normalised({"a": scores, "b": scores[:1]}, group_baseline=baseline)
        after = batch_normalised({"a": moved, "b": moved[:1]}, group_baseline=baseline)
        np.testing.assert_allclose(after["a"], before["a"], rtol=1e-6, atol=1e-6)


@given(score_lists)
def test_advantages_sum_to_zero_and_std_is_one(scores) -> None:
    for values in (
        group_relative(scores, std=True),
        group_relative(scores, std=False),
        leave_one_out(scores),
        batch_normalised({"a": scores}, group_baseline=False)["a"],
    ):
        assert abs(values.sum()) < 1e-9 * (1 + np.abs(values).sum())
    if np.ptp(scores) > 0:
        assert group_relative(scores, std=True).std(ddof=1) == pytest.approx(1.0)
        assert batch_normalised({"a": scores}, group_baseline=True)["a"].std(ddof=1) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "scores", [[0.1 + 0.2, 0.3, 0.3], [1e30 * (0.1 + 0.2), 3e29], [0.0, -0.0], [5e-324] * 3]
)
def test_float_noise_is_no_signal(scores) -> None:
    for std in (True, False):
        assert not group_relative(np.array(scores), std=std).any()
    assert not batch_normalised({"a": np.array(scores)}, group_baseline=False)["a"].any()


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_tiny_and_huge_scores_keep_their_advantages(scale) -> None:
    scores = np.array([0.0, 1.0, 3.0])
    np.testing.assert_allclose(group_relative(scores * scale, std=True), group_relative(scores, std=True))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 100))
def test_token_weights_add_up(trained, max_tokens) -> None:
    trained_R = np.array(trained)
    sums = {
        k: (token_weights(k, trained_R, max_tokens) * trained_R).sum()
        for k in ("tokens", "sequence", "constant")
    }
    assert sums["tokens"] == pytest.approx(1.0 if trained_R.any() else 0.0)
    assert sums["sequence"] == pytest.approx((trained_R > 0).mean())
    assert sums["constant"] == pytest.approx(trained_R.sum() / (len(trained) * max_tokens))


# --- who counts --------------------------------------------------------------------------------------------


def test_a_group_with_one_valid_member_is_dropped_and_counted() -> None:
    lonely = Group(
        id="b",
        task=make_rollout("b", 0).task,
        step=1,
        rollouts=(make_rollout("b", 0, score=1.0), make_rollout("b", 1, valid=False)),
    )
    groups = [make_group("a", [0.0, 1.0]), lonely]
    batch = one(make("grpo").minibatches(groups, 3))
    assert batch.step == 3 and {s.group_id for s in batch.samples} == {"a"}
    assert batch.stats["groups"] == 2 and batch.stats["groups_dropped"] == 1
    assert batch.stats["rollouts_valid"] == 3 and batch.stats["rollouts_invalid"] == 1
    assert batch.stats["reward_mean"] == pytest.approx(2 / 3), "filtered groups count in the reward"
    assert batch.stats["tokens"] == 4, "but not in the denominator"
    assert {s.group_id for s in one(make("reinforce++").minibatches(groups, 1)).samples} == {"a", "b"}
    assert {s.group_id for s in one(make("reinforce++_baseline").minibatches(groups, 1)).samples} == {"a"}


@pytest.mark.parametrize("name", sorted(ALGOS))
def test_nothing_to_learn_from_is_one_empty_batch_that_says_so(name) -> None:
    dead = make_group("a", [1.0, 1.0], valid=False)
    for groups in ([], [dead]):
        batch = one(make(name, minibatches=4).minibatches(groups, 1))
        assert batch.samples == () and batch.stats["tokens"] == 0
        assert batch.stats["groups_dropped"] == len(groups)


def test_samples_carry_the_record_after_the_prompt() -> None:
    rollout = make_rollout(
        "a", 0, score=1.0, mask=(True, False, True), logprobs=(-0.5, np.nan, -2.0), prompt=(4, 5)
    )
    group = Group(id="a", task=rollout.task, step=1, rollouts=(rollout, make_rollout("a", 1)))
    sample = one(make("dapo").minibatches([group], 1)).samples[0]
    assert sample.prompt_P.tolist() == [4, 5] and sample.ids_S.tolist() == [10, 11, 12]
    assert sample.mask_S.tolist() == [True, False, True] and sample.logprobs_S.tolist() == [-0.5, 0.0, -2.0]
    assert sample.weights_S.tolist() == [0.25, 0.0, 0.25] and sample.advantages_S[1] == 0.0
    assert sample.anchor_S is not None and sample.anchor_S.tolist() == sample.logprobs_S.tolist()
    for array in (sample.logprobs_S, sample.advantages_S, sample.weights_S):
        assert array.dtype == np.float32
    assert one(make("grpo_truncate").minibatches([group], 1)).samples[0].anchor_S is None


def test_a_rollout_without_trained_tokens_counts_but_is_not_computed() -> None:
    silent = make_rollout("a", 0, score=0.0, mask=(False, False))
    group = Group(id="a", task=silent.task, step=1, rollouts=(silent, make_rollout("a", 1, score=1.0)))
    batch = one(make("grpo").minibatches([group], 1))
    assert [s.rollout_id for s in batch.samples] == ["a/1"]
    assert batch.samples[0].weights_S.tolist() == [0.25, 0.25], "the mean is over two rollouts"


@quick
@given(names, seeds, st.integers(1, 6))
def test_minibatches_partition_whole_groups(name, seed, minibatches) -> None:
    case = random_case(seed, groups=5)
    whole = one(make(name).minibatches(case.groups, 1))
    parts = make(name, minibatches=minibatches).minibatches(case.groups, 1)
    kept = whole.stats["groups"] - whole.stats["groups_dropped"]
    assert len(parts) == max(1, min(minibatches, kept))
    homes = [{s.group_id for s in p.samples} for p in parts]
    assert sum(len(h) for h in homes) == len(set().union(*homes)), "a group is never split"
    assert max(map(len, homes)) - min(map(len, homes)) <= 1, "every part gets its share of signal"
    whole_ids = sorted(s.rollout_id for s in whole.samples)
    assert sorted(s.rollout_id for p in parts for s in p.samples) == whole_ids
    for key in ("groups", "groups_dropped", "groups_skipped", "rollouts_valid", "rollouts_invalid", "tokens"):
        assert sum(p.stats[key] for p in parts) == whole.stats[key]
    advantages = {s.rollout_id: s.advantages_S.tolist() for s in whole.samples}
    assert all(s.advantages_S.tolist() == advantages[s.rollout_id] for p in parts for s in p.samples)


# --- numbers at the edge -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ALGOS))
@pytest.mark.parametrize("far", [0.0, -1e4, -3e38])
@pytest.mark.parametrize("field", ["current", "anchor", "reference", "sampler"])
def test_extreme_log_probs_stay_finite(name, field, far) -> None:
    case = random_case(3)
    for r in case.rollouts:
        far_T = r.logprobs_T[r.prompt_tokens :] if field == "sampler" else getattr(case, field)[r.id]
        far_T[::2] = far
    algorithm = make(name)
    result = evaluate(algorithm, one(algorithm.minibatches(case.groups, 1)), case)
    assert np.isfinite(result.loss) and all(np.isfinite(g).all() for g in result.gradients.values())
    assert all(np.isfinite(v) for v in result.figures.values())


@pytest.mark.parametrize("name", sorted(ALGOS))
def test_on_policy_every_ratio_is_exactly_one(name) -> None:
    case = random_case(5)
    for r in case.rollouts:
        sampled = np.nan_to_num(r.logprobs_T[r.prompt_tokens :])
        case.current[r.id] = case.anchor[r.id] = case.reference[r.id] = sampled
    algorithm = make(name)
    figures = evaluate(algorithm, one(algorithm.minibatches(case.groups, 1)), case).figures
    assert figures["ratio_sum"] == figures["tokens"] > 0
    assert figures["clipped_tokens"] == figures["anchor_kl_sum"] == 0
    assert figures.get("reference_kl_sum", 0.0) == 0.0
    assert figures.get("importance_sum", figures["tokens"]) == figures["tokens"]


def test_a_sequence_lost_among_others_is_still_one_sequence() -> None:
    """GSPO pools by ``sequence_N``: tokens of two samples may come interleaved."""
    import torch

    from croze.train.protocol import LossInputs

    algorithm = make("gspo")

    def loss(order: list[int]) -> float:
        logprobs = torch.tensor([-1.0, -1.2, -0.8, -2.0])[order]
        fours = torch.full((4,), 0.25)
        inputs = LossInputs(
            logprobs_N=logprobs,
            rollout_N=torch.full((4,), -1.1),
            anchor_N=torch.full((4,), -1.1),
            advantages_N=torch.tensor([1.0, 1.0, -1.0, -1.0])[order],
            weights_N=fours,
            mask_N=torch.ones(4),
            sequence_N=torch.tensor([0, 0, 1, 1])[order],
            sequences=2,
        )
        return algorithm.loss(inputs)[0].item()

    assert loss([0, 2, 1, 3]) == pytest.approx(loss([0, 1, 2, 3]), rel=1e-12)


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"prompt_tokens": 0}, "prompt tokens"),
        ({"mask_T": np.ones(5, dtype=bool)}, "train on its prompt"),
        ({"mask_T": np.zeros(4, dtype=bool)}, "unequal lengths"),
        ({"logprobs_T": np.full(5, np.nan, np.float32)}, "finite log-prob"),
        ({"logprobs_T": np.full(5, -np.inf, np.float32)}, "finite log-prob"),
        ({"outcome": Outcome(score=float("nan"))}, "score nan"),
        ({"outcome": Outcome(score=float("inf"))}, "score inf"),
        ({"outcome": Outcome(score=1e39)}, "score 1e\\+39"),
        ({"group_id": "b"}, "belongs to group"),
        ({"id": "a/1"}, "came twice"),
    ],
)
def test_a_broken_record_is_named_not_trained(changes, what) -> None:
    first, second = make_group("a", [0.0, 1.0]).rollouts
    broken = msgspec.structs.replace(first, **changes)
    group = Group(id="a", task=first.task, step=1, rollouts=(broken, second))
    with pytest.raises(InvariantViolated, match=what) as caught:
        make("grpo").minibatches([group], 1)
    assert broken.id in caught.value.message


def test_raw_log_probs_are_refused_where_temperature_is_not_one() -> None:
    group = make_group("a", [0.0, 1.0], logprobs_kind="raw")
    assert one(build(Algo(), Sampling()).minibatches([group], 1)).samples
    with pytest.raises(InvariantViolated, match="before temperature"):
        build(Algo(), Sampling(temperature=0.6)).minibatches([group], 1)


@pytest.mark.parametrize(
    ("algo", "where"),
    [
        (Algo(name="rloo", advantage_std=False), "algo.advantage_std"),
        (Algo(group_baseline=True), "algo.group_baseline"),
        (Algo(importance="mask"), "algo.importance"),
        (Algo(anchor="recomputed", importance_cap=3.0), "algo.importance_cap"),
        (Algo(anchor="recomputed", importance="mask", importance_cap=0.0), "algo.importance_cap"),
        (Algo(clip_low=1.5), "algo.clip_low"),
        (Algo(clip_high=-0.1), "algo.clip_high"),
        (Algo(clip_high=float("inf")), "algo.clip_high"),
        (Algo(kl=float("nan")), "algo.kl"),
        (Algo(entropy=-0.1), "algo.entropy"),
    ],
)
def test_options_without_a_meaning_are_refused(algo, where) -> None:
    with pytest.raises(ConfigError) as caught:
        build(algo, Sampling())
    assert caught.value.where == where


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_p=0.9), Sampling(top_k=5), Sampling(temperature=0.0), Sampling(max_tokens=0)],
)
def test_sampling_that_the_loss_does_not_assume_is_refused(sampling) -> None:
    with pytest.raises(ConfigError):
        build(Algo(), sampling)


def test_what_the_trainer_must_provide_is_declared() -> None:
    plain, rich = make("dapo"), make("grpo_kl_entropy", anchor="recomputed")
    assert not (plain.needs_entropy or plain.needs_reference or plain.recompute_anchor)
    assert rich.needs_entropy and rich.needs_reference and rich.recompute_anchor
    with pytest.raises(ConfigError):
        make("dapo", minibatches=0)
