"""A request's tokens and log-probs do not depend on its neighbours, bit for bit.

A state machine submits requests at random moments (siblings, several turns, shared beginnings), aborts some,
changes the weights, under small limits of rows, chunks and KV memory. Whatever ran under one set of weights is then
run again by itself, sibling by sibling, and computed by the trainer: all three must be equal to the last bit.
"""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import small_models as small
from croze.inference.core import EngineCore
from croze.inference.protocol import Chunk, Request
from croze.models import numerics
from croze.models.device import ComputeThread
from croze.models.numerics import Recipe
from croze.models.weights import LoraSpec

ADAPTER = LoraSpec(rank=4, scale=2.0, targets=small.ALL_LINEARS)
SMALL = small.architecture()
WIDE_HEADS = small.architecture(hidden=96, heads=6, kv_heads=3, head_dim=64, intermediate=1100, layers=1)
"""An intermediate size that is no multiple of a vector: with two threads silu has remainders in the middle."""
DEMO = small.architecture(hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, layers=1)
"""A layer as in smollm2-135m, K = 576 and 1536."""
KV_TOKENS = 620
"""A KV memory that a few requests fill: the others queue."""
RAREST_PROMPT = 300
"""Keys beyond one tile of values."""


class Letters:
    """A letter a token."""

    def decode(self, ids, *, special: bool = False) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


@dataclass
class Asked:
    """A request under way: its records, and whether it saw more than one set of weights."""

    request: Request
    records: list[small.Record]
    mixed: bool = False

    @property
    def over(self) -> bool:
        return all(r.finish is not None for r in self.records)


def tokens(root: int, count: int) -> list[int]:
    rng = random.Random(root)
    return [rng.randrange(small.architecture().vocab) for _ in range(count)]


LENGTHS = st.one_of(st.integers(1, 60), st.integers(1, 60), st.just(RAREST_PROMPT))
TURNS = st.one_of(st.just(0), st.integers(1, 40))
SAMPLING = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 12),
        "temperature": st.sampled_from([1.0, 1.0, 0.0, 0.7, 1.3]),
        "top_p": st.sampled_from([1.0, 1.0, 0.8]),
        "top_k": st.sampled_from([0, 0, 5]),
        "stop_ids": st.sampled_from([(), tuple(range(0, 307, 11))]),
        "stop": st.sampled_from([(), ("q",), ("ab", "zz", "e")]),
        "seed": st.integers(0, 3),
    }
)
OPTIONS = st.fixed_dictionaries(
    {"prefill_chunk": st.sampled_from([1, 7, 30, 64, 5000]), "max_rows": st.sampled_from([3, 5, 8, 64])}
)


class Neighbours(RuleBasedStateMachine):
    """``rig``: the model, with the recipe under test."""

    def __init__(self, rig: small.Rig) -> None:
        super().__init__()
        self.rig = rig
        self.base = {k: m.clone() for k, m in rig.trainer.parameters.masters.items()}
        self.asked: dict[str, Asked] = {}
        self.done: list[Asked] = []
        self.updates = 0
        self.core: EngineCore

    @initialize(options=OPTIONS, tight=st.booleans())
    def start(self, options: dict[str, int], tight: bool) -> None:
        self.core = self.rig.engine(Letters(), **options)
        if tight:
            self.core.cache.limit_bytes = KV_TOKENS * self.core.cache.token_bytes

    @rule(
        roots=st.tuples(st.integers(0, 2), st.integers(0, 50)),
        shared=st.sampled_from([0, 5, 25]),
        length=LENGTHS,
        turns=st.lists(TURNS, min_size=1, max_size=4),
        sampling=SAMPLING,
    )
    def submit(self, roots, shared: int, length: int, turns: list[int], sampling) -> None:
        prompt = (tokens(roots[0], shared) + tokens(roots[1], length))[:RAREST_PROMPT]
        suffixes = [tokens(roots[1] + i + 100, n) for i, n in enumerate(turns)] if any(turns) else []
        self._submit(prompt, suffixes, len(turns), sampling)

    @precondition(lambda self: any(a.over for a in self._all()))
    @rule(data=st.data(), fresh=st.integers(1, 20), as_prompt=st.booleans(), sampling=SAMPLING)
    def take_another_turn(self, data: st.DataObject, fresh: int, as_prompt: bool, sampling) -> None:
        """On from what was generated: as a session does, or with all of it as a new prompt."""
        before = data.draw(st.sampled_from([a for a in self._all() if a.over]))
        prompt, given = before.request.prompt_P.tolist(), before.request.suffixes
        records = [
            (given[i].tolist() if given else []) + r.ids + tokens(fresh, fresh)
            for i, r in enumerate(before.records)
        ]
        if as_prompt:
            self._submit((prompt + records[0])[:RAREST_PROMPT], [], 2, sampling)
        else:
            self._submit(prompt, [r[:60] for r in records], len(records), sampling)

    def _submit(self, prompt: list[int], suffixes: list[list[int]], siblings: int, sampling) -> None:
        name = f"r{len(self.asked) + len(self.done)}"
        request = small.request(name, prompt, siblings, suffixes=suffixes, **sampling)
        self.core.submit(request)
        self.asked[name] = Asked(request, [small.Record() for _ in range(siblings)])

    def _all(self) -> list[Asked]:
        return [*self.done, *self.asked.values()]

    @precondition(lambda self: self.core.busy)
    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._take(self.core.step())

    @precondition(lambda self: self.core.busy)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n, a in self.asked.items() if not a.over]))
        self._take(self.core.abort(name))

    def _take(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            record = self.asked[chunk.request_id].records[chunk.sibling]
            assert record.finish is None, "tokens after the end"
            record.ids += chunk.ids_T.tolist()
            record.logprobs += chunk.logprobs_T.tolist()
            record.finish = chunk.finish

    @rule(seed=st.integers(0, 1000))
    def change_weights(self, seed: int) -> None:
        """Who lives on under new weights stays as a neighbour and is not compared."""
        self._compare()
        for asked in self.asked.values():
            asked.mixed = True
        parameters, generator = self.rig.trainer.parameters, torch.Generator().manual_seed(seed)
        for key, master in parameters.masters.items():
            master.copy_(self.base[key] + 0.02 * torch.randn(master.shape, generator=generator))
        parameters.changed()
        self.updates += 1
        self.rig.publish(f"{id(self)}-{self.updates}")
        self.core.load(self.rig.weights.weights_id, None)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(5000):
            if not self.core.busy:
                break
            self._take(self.core.step())
        assert all(a.over for a in self.asked.values())
        self._compare()
        assert not self.asked
        for key, master in self.rig.trainer.parameters.masters.items():
            master.copy_(self.base[key])
        self.rig.trainer.parameters.changed()
        self.rig.publish("w0")

    def _compare(self) -> None:
        """Everything over, with the same run alone and with the trainer."""
        over = {name: a for name, a in self.asked.items() if a.over}
        for name, asked in over.items():
            del self.asked[name]
            self.done.append(asked)
        pure = [a for a in over.values() if not a.mixed]
        for asked in pure:
            for sibling, record in enumerate(asked.records):
                self._compare_alone(asked.request, sibling, record)
        self._compare_trainer([a for a in pure if a.request.params.temperature in (0.0, 1.0)])

    def _compare_alone(self, request: Request, sibling: int, record: small.Record) -> None:
        if record.finish == "aborted" and not record.ids:
            return
        core = self.rig.engine(Letters(), prefill_chunk=self.core.scheduler.options.prefill_chunk + 3)
        alone = small.drive(core, [only(request, sibling)])[request.id, 0]
        if record.finish == "aborted":
            count = len(record.ids)
            alone = small.Record(alone.ids[:count], alone.logprobs[:count], finish="aborted")
        assert (record.tokens, record.finish) == (alone.tokens, alone.finish)

    def _compare_trainer(self, asked: list[Asked]) -> None:
        records = {(a.request.id, i): r for a in asked for i, r in enumerate(a.records)}
        samples = small.to_samples([a.request for a in asked], records)
        samples = [s for s in samples if s.mask_S.any()]
        for sample, found in zip(samples, self.rig.trainer.logprobs(samples), strict=True):
            np.testing.assert_array_equal(found[sample.mask_S], sample.logprobs_S[sample.mask_S])


def only(request: Request, sibling: int) -> Request:
    """One sibling of ``request``."""
    return Request(
        id=request.id,
        prompt_P=request.prompt_P,
        keys=request.keys[sibling : sibling + 1],
        params=request.params,
        suffixes=request.suffixes[sibling : sibling + 1],
    )


def explore(rig: small.Rig, examples: int, *phases: Phase) -> None:
    run_state_machine_as_test(
        lambda: Neighbours(rig),
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=phases or tuple(Phase),
        ),
    )


CASES = {
    # architecture, arithmetic, adapter, threads, examples
    "fp32": (SMALL, "float32", None, 1, 6),
    "bf16": (SMALL, "bfloat16", None, 1, 6),
    "fp32, adapter": (SMALL, "float32", ADAPTER, 1, 4),
    "bf16, adapter, two threads": (SMALL, "bfloat16", ADAPTER, 2, 3),
    "fp32, two threads, odd sizes": (WIDE_HEADS, "float32", None, 2, 4),
    "bf16, large heads": (WIDE_HEADS, "bfloat16", None, 1, 3),
    "fp32, the demo's layer, two threads": (DEMO, "float32", None, 2, 2),
    "bf16, the demo's layer": (DEMO, "bfloat16", None, 1, 1),
}


def on_threads(threads: int, test: Callable[[], None]) -> None:
    """Run ``test`` as a run computes: on a thread of its own that has so many torch threads."""
    thread = ComputeThread(threads)
    try:
        thread.run_now(test)
    finally:
        thread.close()
        torch.set_num_threads(1)


@pytest.mark.parametrize("name", CASES)
def test_a_request_is_the_same_alone(name):
    arch, dtype, lora, threads, examples = CASES[name]

    def test() -> None:
        how = numerics.choose(arch, dtype, "cpu", True, rank=0 if lora is None else lora.rank)
        if not how.exact:
            pytest.skip(f"numerics.measure says: {how.note}")
        explore(small.make_rig(arch, dtype=dtype, lora=lora, how=how), examples)

    on_threads(threads, test)


TILED = {
    "fp32": (SMALL, "float32", None, 1, 4),
    "bf16, adapter": (SMALL, "bfloat16", ADAPTER, 1, 2),
    "fp32, two threads, odd sizes": (WIDE_HEADS, "float32", ADAPTER, 2, 2),
}


@pytest.mark.parametrize("name", TILED)
def test_a_request_is_the_same_alone_in_fixed_tiles(name):
    arch, dtype, lora, threads, examples = TILED[name]

    def test() -> None:
        how = numerics.choose(
            arch, dtype, "cpu", True, rank=0 if lora is None else lora.rank, invariant=True
        )
        assert how.exact and how.note.startswith("exact by fixed tiles"), how.note
        explore(small.make_rig(arch, dtype=dtype, lora=lora, how=how), examples)

    on_threads(threads, test)


def unprotected() -> Recipe:
    """No padding, no measured limits: what a library's choice of kernels by shape does to fp32."""
    return Recipe(dtype=torch.float32, packed=False, linear_rows=1, bmm_rows=1, pv_tile=4096)


def test_without_protection_it_fails_and_with_tiles_it_holds():
    how, arch = unprotected(), WIDE_HEADS
    if all(numerics.linear_holds(how, 1, o, i) for o, i in numerics.linear_shapes(arch)):
        pytest.skip("this machine's linears need no protection")
    with pytest.raises(AssertionError):
        explore(small.make_rig(arch, how=how), 10, Phase.generate)
    tiled = numerics.measure(arch, numerics.in_tiles(how, numerics.LADDER[0]))
    assert tiled.exact and not tiled.packed
    explore(small.make_rig(arch, how=tiled), 3)
    # and the smallest tiles, which leave nothing but rows by themselves
    single = dataclasses.replace(numerics.in_tiles(how, numerics.LADDER[-1]), exact=True)
    explore(small.make_rig(arch, how=single), 1)
