"""The engine step by step: ends, limits, refusals, changes of weights, KV memory."""

import random

import numpy as np
import pytest

import small_models as small
from croze.config import EngineOptions
from croze.errors import EngineFault, UsageError
from croze.inference.core import EngineCore
from croze.models.weights import ModelWeights
from croze.types import WeightsId

ARCH = small.architecture(layers=1, context=128)


@pytest.fixture
def rig() -> small.Rig:
    return small.make_rig(ARCH, measured=False)


class Letters:
    """Token i is a letter or, for every third, two; 300 and above decode to nothing (special tokens)."""

    eos_ids: tuple[int, ...] = (0,)
    vocab_size = ARCH.vocab

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        raise AssertionError("not needed")

    def decode(self, ids, *, special: bool = False) -> str:
        return "".join(self.text(i) for i in ids)

    def text(self, i: int) -> str:
        return "" if i >= 300 else chr(97 + i % 26) + (chr(97 + i // 26) if i % 3 == 0 else "")


def free_run(rig: small.Rig, length: int = 40) -> list[int]:
    """Tokens that request "x" samples when nothing stops it."""
    return small.drive(rig.engine(), [small.request("x", [1, 2, 3], max_tokens=length)])["x", 0].ids


def test_a_request_ends_at_max_tokens(rig):
    for length in (1, 7):
        record = small.drive(rig.engine(), [small.request("x", [1, 2, 3], max_tokens=length)])["x", 0]
        assert (len(record.ids), record.finish) == (length, "length")


def test_a_stop_token_is_kept_and_ends_it(rig):
    ids = free_run(rig)
    stop = ids[5]
    record = small.drive(rig.engine(), [small.request("x", [1, 2, 3], max_tokens=40, stop_ids=(stop,))])[
        "x", 0
    ]
    assert (record.ids, record.finish) == (ids[: ids.index(stop) + 1], "stop")


def test_the_context_ends_it(rig):
    prompt = list(range(100))
    record = small.drive(rig.engine(), [small.request("x", prompt, max_tokens=1000)])["x", 0]
    assert (len(record.ids), record.finish) == (28, "context")
    record = small.drive(rig.engine(), [small.request("x", prompt, max_tokens=28)])["x", 0]
    assert (len(record.ids), record.finish) == (28, "length")
    turns = small.drive(
        rig.engine(), [small.request("x", prompt, 2, suffixes=[prompt[:27], []], max_tokens=5)]
    )
    assert (len(turns["x", 0].ids), turns["x", 0].finish) == (1, "context")
    assert (len(turns["x", 1].ids), turns["x", 1].finish) == (5, "length")


def test_stop_strings_across_token_borders(rig):
    ids, letters = free_run(rig), Letters()
    for start in (0, 3, 11):
        text = letters.decode(ids[start : start + 3])
        for stop in (text, text[1:-1] or text, letters.text(ids[start])):
            record = small.drive(
                rig.engine(letters), [small.request("x", [1, 2, 3], max_tokens=40, stop=("never", stop))]
            )["x", 0]
            ends = next(n for n in range(1, 41) if stop in letters.decode(ids[:n]))
            assert (record.ids, record.finish) == (ids[:ends], "stop")


def test_a_stop_string_in_the_prompt_or_an_earlier_turn_does_not_count(rig):
    ids, letters = free_run(rig, 6), Letters()
    given = [4, 5]
    stop = letters.decode(given)
    assert stop not in letters.decode(ids)
    r = small.request("y", given, suffixes=[given], max_tokens=6, stop=(stop,))
    record = small.drive(rig.engine(letters), [r])["y", 0]
    assert len(record.ids) == 6 or stop in letters.decode(record.ids)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": []}, "at least one prompt token"),
        ({"prompt": range(128)}, "context 128"),
        ({"prompt": [1], "suffixes": [[1] * 127]}, "context 128"),
        ({"prompt": [1, 307]}, "token id 307"),
        ({"prompt": [-1]}, "token id -1"),
        ({"prompt": [1], "suffixes": [[999]]}, "token id 999"),
        ({"prompt": [1], "siblings": 0}, "at least one sibling"),
        ({"prompt": [1], "siblings": 2, "suffixes": [[1]]}, "1 suffixes for 2 siblings"),
        ({"prompt": [1], "keys": (-1,)}, "64-bit"),
        ({"prompt": [1], "keys": (1 << 64,)}, "64-bit"),
        ({"prompt": [1], "seed": -1}, "64-bit"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens"),
        ({"prompt": [1], "temperature": -1.0}, "temperature"),
        ({"prompt": [1], "temperature": float("nan")}, "temperature"),
        ({"prompt": [1], "top_p": 0.0}, "top_p"),
        ({"prompt": [1], "top_k": -1}, "top_k"),
        ({"prompt": [1], "stop": ("",)}, "stop"),
        ({"prompt": [1], "stop": ("a",)}, "tokenizer"),
    ],
)
def test_what_can_never_run_is_refused_at_once(rig, fields, words):
    core = rig.engine(max_rows=8)
    core.submit(small.request("good", [1, 2], 3))
    prompt, siblings = fields.pop("prompt"), fields.pop("siblings", 1)
    with pytest.raises(UsageError, match=words):
        core.submit(small.request("bad", prompt, siblings, **fields))
    assert len(small.drive(core, [])) == 3  # nobody else is disturbed


def test_a_group_larger_than_what_fits_enters_in_parts(rig):
    whole = small.drive(rig.engine(), [small.request("g", range(20), 9, max_tokens=12)])
    core = rig.engine(max_rows=4)
    assert small.drive(core, [small.request("g", range(20), 9, max_tokens=12)]) == whole
    core.submit(small.request("g", range(20), 9, max_tokens=12))
    core.step()
    ended = core.abort("g")
    assert sorted(c.sibling for c in ended if c.finish == "aborted") == list(range(9)) and not core.busy


def test_a_rollout_that_no_memory_can_hold_is_refused_with_a_way_out():
    arch = small.architecture(layers=8, kv_heads=4, head_dim=64, context=4096)
    core = small.make_rig(arch, measured=False).engine(kv_memory_mib=8)
    with pytest.raises(UsageError, match="MiB of KV memory") as refusal:
        core.submit(small.request("x", range(300), 64, max_tokens=3000))
    assert "engine.kv_memory_mib" in str(refusal.value.fix)


def test_kv_memory_never_exceeds_its_cap():
    """Many groups through little memory: they queue, all end, and what is allocated stays under the cap."""
    arch = small.architecture(layers=2, kv_heads=4, head_dim=64, context=512)
    rig = small.make_rig(arch, measured=False)
    core = rig.engine(kv_memory_mib=1)
    rng = random.Random(0)
    requests = [
        small.request(
            f"r{i}",
            rng.choices(range(307), k=rng.choice((3, 70, 150))),
            rng.randint(1, 2),
            max_tokens=rng.randint(1, 40),
        )
        for i in range(12)
    ]
    for r in requests:
        core.submit(r)
    records: small.Records = {}
    queued, cache = 0, core.cache
    while core.busy:
        small.collect(core, records)
        pools = [cache.prompt_k, cache.prompt_v, cache.suffix_k, cache.suffix_v]
        allocated = sum(t.nbytes for pool in pools for t in pool)
        stats = core.stats()
        assert allocated == stats.kv_bytes <= stats.kv_limit_bytes == 1 << 20
        queued = max(queued, stats.queued)
    assert queued > 0
    assert all(r.finish == "length" for r in records.values())
    assert len(records) == sum(len(r.keys) for r in requests)
    roomy = small.drive(rig.engine(), requests)
    assert {k: r.ids for k, r in records.items()} == {k: r.ids for k, r in roomy.items()}


def test_growing_needs_room_for_the_move():
    core = small.make_rig(ARCH, measured=False).engine()
    cache = core.cache
    row = cache.token_bytes * 32
    cache.limit_bytes = 7 * row
    assert cache.fits(1, 32, 5, 32)
    cache.reserve(1, 32, 5, 32)
    assert cache.fits(1, 32, 5, 32)
    assert not cache.fits(1, 32, 6, 32)  # 7 rows in the end, and 5 half rows (one layer's keys) to be copied
    cache.clear()
    assert cache.fits(1, 32, 6, 32)


def test_abort_of_waiting_and_of_live_requests(rig):
    core = rig.engine(max_rows=2)
    for name in ("live", "waiting", "other"):
        core.submit(small.request(name, [1, 2, 3], 2, max_tokens=9))
    records: small.Records = {}
    for _ in range(3):
        small.collect(core, records)
    for name, got in (("waiting", 0), ("live", 0), ("unknown", 0)):
        chunks = core.abort(name)
        assert [(c.sibling, c.finish, len(c.ids_T)) for c in chunks] == (
            [] if name == "unknown" else [(0, "aborted", got), (1, "aborted", got)]
        )
    while core.busy:
        small.collect(core, records)
    assert {r.finish for k, r in records.items() if k[0] == "other"} == {"length"}
    assert [len(records["live", i].ids) for i in range(2)] == [3, 3]
    assert not core.abort("live")


def test_abort_while_a_prompt_is_computed(rig):
    core = rig.engine(prefill_chunk=4)
    core.submit(small.request("x", range(50), 3))
    core.submit(small.request("y", range(9), 1))
    records: small.Records = {}
    small.collect(core, records)
    assert len(core.abort("x")) == 3
    while core.busy:
        small.collect(core, records)
    alone = small.drive(rig.engine(), [small.request("y", range(9), 1)])
    assert records["y", 0].ids == alone["y", 0].ids


def test_tokens_carry_the_weights_that_made_them(rig):
    core = rig.engine()
    core.submit(small.request("x", [1, 2, 3], 2, max_tokens=10))
    records: small.Records = {}
    for _ in range(4):
        small.collect(core, records)
    rig.publish("w1")  # the same masters, another name
    with pytest.raises(EngineFault, match="not the committed ones"):
        core.step()
    core.load(WeightsId("w1"), None)
    while core.busy:
        small.collect(core, records)
    assert records["x", 0].weights == ["w0"] * 4 + ["w1"] * 6


def test_weights_that_were_not_committed_are_not_served(rig):
    core = EngineCore(rig.weights, EngineOptions())
    core.submit(small.request("x", [1]))
    for call in (core.step, lambda: core.score(np.array([1], np.int32), np.array([2], np.int32), 1.0)):
        with pytest.raises(EngineFault, match="committed"):
            call()
    with pytest.raises(EngineFault, match="not prepared"):
        core.load(WeightsId("w9"), None)
    with pytest.raises(EngineFault, match="committed"):
        core.step()


def test_an_engine_takes_tensors_of_its_own(rig):
    """Weights not shared with the trainer: the same tokens."""
    weights = ModelWeights(ARCH, rig.weights.recipe)
    core = EngineCore(weights, EngineOptions())
    core.load(WeightsId("w0"), rig.trainer.export())
    requests = [small.request("x", [1, 2, 3], 2)]
    assert small.drive(core, requests) == small.drive(rig.engine(), requests)


def test_logits_that_are_not_finite_are_a_fault_not_a_token():
    tensors = small.random_tensors(ARCH)
    tensors["model.norm.weight"][3] = float("nan")
    core = small.make_rig(ARCH, tensors=tensors, measured=False).engine()
    core.submit(small.request("x", [1, 2, 3]))
    with pytest.raises(EngineFault, match="not finite"):
        core.step()


def test_score_checks_what_it_is_given(rig):
    core = rig.engine()
    empty, one = np.empty(0, np.int32), np.array([1], np.int32)
    assert core.score(one, empty, 1.0).shape == (0,)
    for prompt, suffix in (
        (empty, one),
        (np.zeros(100, np.int32), np.zeros(29, np.int32)),
        (one, np.array([400])),
    ):
        with pytest.raises(UsageError):
            core.score(prompt, suffix, 1.0)
    assert core.score(np.zeros(100, np.int32), np.zeros(28, np.int32), 1.0).shape == (28,)


def test_stats_count_what_was_done(rig):
    core = rig.engine()
    small.drive(core, [small.request("x", range(20), 3, max_tokens=5)])
    stats = core.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.forwards) == (20, 15, 5)
    assert (stats.rows, stats.queued) == (0, 0)
    small.drive(core, [small.request("y", [*range(18), 99, 98], 1, suffixes=[[3, 4]], max_tokens=2)])
    assert core.stats().prompt_tokens == 42


def test_a_common_beginning_is_computed_once(rig):
    """Two prompts of 40 tokens that share 30: in one step and in later ones."""
    shared = list(range(30))
    requests = [
        small.request(n, shared + [i] * 10, 2, max_tokens=4) for n, i in (("a", 1), ("b", 2), ("c", 3))
    ]
    core = rig.engine()
    together = small.drive(core, requests, [0, 0, 2])
    assert core.stats().prompt_tokens == 40 + 10 + 10
    for r in requests:
        assert small.drive(rig.engine(), [r])[r.id, 0] == together[r.id, 0]
