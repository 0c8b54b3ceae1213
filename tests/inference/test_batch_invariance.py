"""A request's tokens and log-probs do not depend on its neighbours, bit for bit.

A random schedule submits requests at any moment (siblings, several turns, shared beginnings), aborts some, changes
the weights, under small limits of rows, chunks and KV memory. Whatever ran under one set of weights is then run
again by itself, sibling by sibling, and computed by the trainer: all three must be equal to the last bit.

As a program it plays schedules of ``CHILD`` on two threads, of so many seeds as it is told: OpenMP reads only at its
start that waiting threads should sleep, and ones that spin take minutes on a busy machine.
"""

import dataclasses
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

import small_models as small
from croze.inference.protocol import Chunk, Request
from croze.models import numerics
from croze.models.architecture import Architecture
from croze.models.device import ComputeThread
from croze.models.numerics import Recipe
from croze.models.tiles import LADDER
from croze.models.weights import LoraSpec

ADAPTER = LoraSpec(rank=4, scale=2.0, targets=small.ALL_LINEARS)
SMALL = small.architecture()
ODD = small.architecture(hidden=96, heads=6, kv_heads=3, head_dim=64, intermediate=1100, layers=1)
"""An intermediate size that is no multiple of a vector: two threads of an elementwise kernel meet inside of one."""
DEMO = small.architecture(hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, layers=1)
"""A layer as in smollm2-135m, K = 576 and 1536."""
KV_TOKENS = 620
"""A KV memory that a few requests fill: the others queue."""
LONGEST = 300
"""A prompt longer than one tile of values."""
MOVES = {"submit": 6, "turn": 3, "step": 10, "abort": 1, "update": 1}
"""What a schedule does, and how often."""


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


@dataclass
class Schedule:
    """One random life of an engine. ``compared``: tokens found equal, alone and by the trainer, requests that
    queued, weights served."""

    rig: small.Rig
    seed: int
    compared: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.options = {
            "prefill_chunk": rng.choice([3, 7, 30, 64, 5000]),
            "max_rows": rng.choice([3, 5, 8, 64]),
        }
        self.core = self.rig.engine(Letters(), **self.options)
        if rng.random() < 0.5:
            self.core.cache.limit_bytes = KV_TOKENS * self.core.cache.token_bytes
        self.base = {key: master.clone() for key, master in self.rig.trainer.parameters.masters.items()}
        self.asked: dict[str, Asked] = {}
        self.done: list[Asked] = []

    def play(self, moves: int) -> None:
        """So many moves, then all to their ends."""
        self.submit()
        for move in self.rng.choices(list(MOVES), list(MOVES.values()), k=moves):
            getattr(self, move)()
        while self.core.busy:
            self.step()
        self.compare()
        assert not self.asked
        self._publish({key: torch.zeros_like(master) for key, master in self.base.items()})

    def submit(self) -> None:
        rng = self.rng
        length = rng.randint(1, 60) if rng.random() < 0.9 else LONGEST
        prompt = tokens(rng.randrange(3), rng.choice([0, 5, 25])) + tokens(rng.randrange(50), length)
        siblings = rng.choice([1, 1, 2, 4])
        turns = [tokens(rng.randrange(50), rng.choice([0, 0, 1, 5, 40])) for _ in range(siblings)]
        self._submit(prompt[:LONGEST], turns if rng.random() < 0.5 else [], siblings)

    def turn(self) -> None:
        """On from what was generated: as a session does, or with all of it as a new prompt."""
        over = [a for a in (*self.done, *self.asked.values()) if a.over]
        if not over:
            self.step()
            return
        before, fresh = self.rng.choice(over), tokens(self.rng.randrange(50), self.rng.randint(1, 20))
        prompt, given = before.request.prompt_P.tolist(), before.request.suffixes
        records = [(given[i].tolist() if given else []) + r.ids + fresh for i, r in enumerate(before.records)]
        if self.rng.random() < 0.5:
            self._submit((prompt + records[0])[:LONGEST], [], 2)
        else:
            self._submit(prompt, [r[:70] for r in records], len(records))

    def _submit(self, prompt: list[int], turns: list[list[int]], siblings: int) -> None:
        rng, name = self.rng, f"r{len(self.asked) + len(self.done)}"
        request = small.request(
            name,
            prompt,
            siblings,
            suffixes=turns,
            max_tokens=rng.randint(1, 12),
            temperature=rng.choice([1.0, 1.0, 1.0, 1.0, 0.0, 0.7, 1.3]),
            top_p=rng.choice([1.0, 1.0, 0.8]),
            top_k=rng.choice([0, 0, 5]),
            stop_ids=rng.choice([(), (), tuple(range(0, 307, 11))]),
            stop=rng.choice([(), (), ("q",), ("ab", "zz", "e")]),
            seed=rng.randrange(3),
        )
        self.core.submit(request)
        self.asked[name] = Asked(request, [small.Record() for _ in range(siblings)])

    def step(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            self._take(self.core.step())
            self.compared["queued"] += len(self.core.scheduler.waiting)

    def abort(self) -> None:
        live = [name for name, asked in self.asked.items() if not asked.over]
        if live:
            self._take(self.core.abort(self.rng.choice(live)))

    def _take(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            record = self.asked[chunk.request_id].records[chunk.sibling]
            assert record.finish is None, "tokens after the end"
            record.ids += chunk.ids_T.tolist()
            record.logprobs += chunk.logprobs_T.tolist()
            record.finish = chunk.finish

    def update(self) -> None:
        """Other weights. Who lives on under them stays as a neighbour and is not compared."""
        self.compare()
        for asked in self.asked.values():
            asked.mixed = True
        generator = torch.Generator().manual_seed(self.rng.randrange(1000))
        self._publish({k: 0.02 * torch.randn(m.shape, generator=generator) for k, m in self.base.items()})

    def _publish(self, added: dict[str, torch.Tensor]) -> None:
        parameters = self.rig.trainer.parameters
        for key, master in parameters.masters.items():
            master.copy_(self.base[key] + added[key])
        parameters.changed()
        self.compared["weights"] += 1
        self.rig.publish(f"{self.seed}-{self.compared['weights']}")
        self.core.load(self.rig.weights.weights_id, None)

    def compare(self) -> None:
        """Everything over, with the same run alone and with the trainer."""
        over = {name: asked for name, asked in self.asked.items() if asked.over}
        self.done += over.values()
        self.asked = {name: asked for name, asked in self.asked.items() if not asked.over}
        pure = [asked for asked in over.values() if not asked.mixed]
        for asked in pure:
            for sibling, record in enumerate(asked.records):
                self._compare_alone(asked.request, sibling, record)
        self._compare_trainer([a for a in pure if a.request.params.temperature in (0.0, 1.0)])

    def _compare_alone(self, request: Request, sibling: int, record: small.Record) -> None:
        core = self.rig.engine(Letters(), prefill_chunk=99)
        alone = small.drive(core, [only(request, sibling)])[request.id, 0]
        if record.finish == "aborted":
            count = len(record.ids)
            alone = small.Record(alone.ids[:count], alone.logprobs[:count], finish="aborted")
        why = f"seed {self.seed}, {self.options}, {request.id}/{sibling}"
        assert (record.tokens, record.finish) == (alone.tokens, alone.finish), why
        self.compared["alone"] += len(record.ids)

    def _compare_trainer(self, asked: list[Asked]) -> None:
        records = {(a.request.id, i): r for a in asked for i, r in enumerate(a.records)}
        samples = small.to_samples([a.request for a in asked], records)
        samples = [s for s in samples if s.mask_S.any()]
        for sample, found in zip(samples, self.rig.trainer.logprobs(samples), strict=True):
            why = f"seed {self.seed}, {self.options}, {sample.rollout_id}"
            np.testing.assert_array_equal(found[sample.mask_S], sample.logprobs_S[sample.mask_S], err_msg=why)
            self.compared["trainer"] += int(sample.mask_S.sum())


def tokens(root: int, count: int) -> list[int]:
    rng = random.Random(root)
    return [rng.randrange(SMALL.vocab) for _ in range(count)]


def only(request: Request, sibling: int) -> Request:
    """One sibling of ``request``."""
    return Request(
        id=request.id,
        prompt_P=request.prompt_P,
        keys=request.keys[sibling : sibling + 1],
        params=request.params,
        suffixes=request.suffixes[sibling : sibling + 1],
    )


def play(rig: small.Rig, seeds: range, moves: int = 20) -> Counter[str]:
    """Play the schedules of ``seeds``; what was compared."""
    compared: Counter[str] = Counter()
    for seed in seeds:
        Schedule(rig, seed, compared).play(moves)
    return compared


@dataclass(frozen=True, kw_only=True)
class Case:
    arch: Architecture
    dtype: str
    lora: LoraSpec | None = None
    invariant: bool = False
    seeds: range = range(1)

    def recipe(self) -> Recipe:
        rank = 0 if self.lora is None else self.lora.rank
        found = numerics.choose(self.arch, self.dtype, "cpu", True, rank=rank, invariant=self.invariant)
        if self.invariant:
            assert found.exact and found.note.startswith("exact by fixed tiles"), found.note
        return found

    def play(self, how: Recipe, seeds: range | None = None) -> Counter[str]:
        compared = play(
            small.make_rig(self.arch, dtype=self.dtype, lora=self.lora, how=how), seeds or self.seeds
        )
        assert compared["alone"] > 20 and compared["trainer"] > 5, compared
        return compared


CASES = {
    "fp32": Case(arch=SMALL, dtype="float32", seeds=range(1, 4)),
    "bf16": Case(arch=SMALL, dtype="bfloat16", seeds=range(3, 5)),
    "fp32, adapter": Case(arch=SMALL, dtype="float32", lora=ADAPTER, seeds=range(6, 7)),
    "bf16, adapter": Case(arch=SMALL, dtype="bfloat16", lora=ADAPTER),
    "bf16, large heads": Case(arch=ODD, dtype="bfloat16", seeds=range(1, 2)),
    "fp32, the demo's layer": Case(arch=DEMO, dtype="float32"),
    "bf16, the demo's layer": Case(arch=DEMO, dtype="bfloat16"),
    "fp32, fixed tiles": Case(arch=SMALL, dtype="float32", invariant=True, seeds=range(1, 2)),
    "bf16, adapter, fixed tiles": Case(arch=SMALL, dtype="bfloat16", lora=ADAPTER, invariant=True),
}
CHILD = {
    "fp32, odd sizes": Case(arch=ODD, dtype="float32", seeds=range(1, 2)),
    "bf16, adapter": Case(arch=SMALL, dtype="bfloat16", lora=ADAPTER),
    "fp32, the demo's layer": Case(arch=DEMO, dtype="float32"),
    "fp32, adapter, fixed tiles": Case(arch=ODD, dtype="float32", lora=ADAPTER, invariant=True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_request_is_the_same_alone(name):
    case = CASES[name]
    how = case.recipe()
    if not how.exact:
        pytest.skip(f"numerics.measure says: {how.note}")
    compared = case.play(how)
    if len(case.seeds) > 2:
        assert compared["queued"] > 10 and compared["weights"] > len(case.seeds), compared


def test_a_request_is_the_same_alone_on_two_threads():
    env = {
        **os.environ,
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(CHILD), done.stdout


def unprotected() -> Recipe:
    """No padding, no measured limits: what a library's choice of kernels by shape does to fp32."""
    return Recipe(dtype=torch.float32, packed=False, linear_rows=1, bmm_rows=1, pv_tile=4096)


def test_without_protection_it_fails_and_with_tiles_it_holds():
    how = unprotected()
    if all(numerics.linear_holds(how, 1, o, i) for o, i in numerics.linear_shapes(ODD)):
        pytest.skip("this machine's linears need no protection")
    with pytest.raises(AssertionError):
        play(small.make_rig(ODD, how=how), range(2))
    tiled = numerics.measure(ODD, numerics.in_tiles(how, LADDER[0]))
    assert tiled.exact and not tiled.packed
    assert play(small.make_rig(ODD, how=tiled), range(2))["alone"] > 50


def test_the_smallest_tiles_leave_nothing_but_rows_by_themselves():
    single = dataclasses.replace(numerics.in_tiles(unprotected(), LADDER[-1]), exact=True)
    assert play(small.make_rig(SMALL, how=single), range(1), moves=6)["alone"] > 10


def main(count: int = 0) -> None:
    thread = ComputeThread(2)
    for name, case in CHILD.items():
        how = thread.run_now(case.recipe)
        told = thread.run_now(case.play, how, range(count)) if how.exact else how.note
        print(f"{name}: {told}", flush=True)
    thread.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
