"""Random schedules without a model: KV memory holds token ids, so that every move can be checked."""

import random
from collections import Counter

import pytest
import torch

import small_models as small
from croze.config import EngineOptions
from croze.errors import UsageError
from croze.inference.cache import KVCache
from croze.inference.protocol import Request
from croze.inference.scheduler import Scheduler, Step
from croze.models.numerics import Recipe

ARCH = small.architecture(layers=1, heads=1, kv_heads=1, head_dim=2, context=120)


class Play:
    """Plays the forward pass and the sampler for a scheduler, and checks it after every step."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        options = EngineOptions(max_rows=self.rng.choice((4, 9)), prefill_chunk=self.rng.choice((1, 5, 40)))
        self.cache = KVCache(ARCH, Recipe(), self.rng.choice((9_000, 60_000, 1 << 20)))
        self.scheduler = Scheduler(self.cache, options, ARCH.context)
        self.ended: Counter[tuple[str, int]] = Counter()
        self.submitted: list[Request] = []
        self.epoch = 0

    def submit(self) -> None:
        rng, number = self.rng, len(self.submitted)
        start = [[7] * 30, [8] * 20, []][number % 3]
        prompt = start + [rng.randrange(300) for _ in range(rng.randint(1, 25))]
        siblings = rng.randint(1, 4)
        suffixes = [[rng.randrange(300) for _ in range(rng.choice((0, 3, 33)))] for _ in range(siblings)]
        request = small.request(
            f"r{number}",
            prompt,
            siblings,
            suffixes=suffixes if rng.random() < 0.5 else [],
            max_tokens=rng.randint(1, 40),
        )
        try:
            self.scheduler.submit(request)
        except UsageError:
            return
        self.submitted.append(request)

    def step(self) -> None:
        waiting = [r.id for r in self.scheduler.waiting]
        self.scheduler.admit()
        left = [r.id for r in self.scheduler.waiting]
        assert waiting[len(waiting) - len(left) :] == left, "first come, first served"
        assert len(self.scheduler.live) <= self.scheduler.options.max_rows
        step = self.scheduler.plan()
        if step is not None:
            self._forward(step)
            self._sample(step)
        if self.scheduler.live and self.rng.random() < 0.05:
            victim = self.rng.choice(self.scheduler.live).request.id
            for s in self.scheduler.live:
                if s.request.id == victim:
                    s.finish = "aborted"
        if self.rng.random() < 0.05:
            self.scheduler.weights_changed()
            self.epoch += 1
        for s in self.scheduler.settle():
            self.ended[s.request.id, s.sibling] += 1
        self._check()

    def _forward(self, step: Step) -> None:
        """Write ids, as the attention writes keys; the decoders are the first slots, in order."""
        decoding, ready = step.decoding, [s for s in self.scheduler.live if s.decoding]
        assert self.scheduler.live[: len(decoding)] == ready
        k = self.cache.suffix_k[0]
        for slot, (position, prompt, length) in enumerate(
            zip(decoding.positions, decoding.prompts, decoding.prompt_lens, strict=True)
        ):
            s = self.scheduler.live[slot]
            assert (prompt, length) == (s.prompt.row, len(s.prompt.ids))
            assert step.positions[slot] == length + position == length + len(s.suffix) - 1
            k[slot, 0, position] = step.ids[slot]
        at = len(decoding)
        prefilled = 0
        for segment in step.segments:
            ids = torch.tensor(step.ids[at : at + segment.count])
            first = segment.start if segment.slot is None else segment.prompt_len + segment.start
            assert step.positions[at : at + segment.count] == list(range(first, first + segment.count))
            if segment.slot is None:
                pool = self.cache.prompt_k[0][segment.prompt, 0]
                if segment.donor is not None:
                    pool[: segment.start] = self.cache.prompt_k[0][segment.donor, 0, : segment.start]
            else:
                pool = k[segment.slot, 0]
            pool[segment.start : segment.start + segment.count] = ids[:, None].float()
            at += segment.count
            prefilled += segment.count
        assert at == len(step.ids) == len(step.positions)
        assert prefilled <= self.scheduler.options.prefill_chunk
        assert at > 0, "a step without work"

    def _sample(self, step: Step) -> None:
        takers = [s for group in step.takers for s in group]
        assert len(takers) == len(set(map(id, takers)))
        assert len(step.rows) == len(step.takers)
        for row, group in zip(step.rows, step.takers, strict=True):
            for s in group:
                assert step.ids[row] == (s.suffix or s.prompt.ids)[-1]
                assert s.pending == 0
        for s in takers:
            s.suffix.append(self.rng.randrange(300))
            if len(s.suffix) >= s.room or self.rng.random() < 0.05:
                s.finish = "length"

    def _check(self) -> None:
        scheduler, cache = self.scheduler, self.cache
        assert [p.row for p in scheduler.prompts] == list(range(len(scheduler.prompts)))
        alive = Counter(id(s.prompt) for s in scheduler.live)
        assert {id(p): p.alive for p in scheduler.prompts} == alive
        assert cache.bytes <= cache.limit_bytes
        for slot, s in enumerate(scheduler.live):
            held = cache.suffix_k[0][slot, 0, : s.computed, 0]
            assert held.tolist() == s.suffix[: s.computed]
            assert len(s.prompt.ids) + len(s.suffix) <= ARCH.context
        for p in scheduler.prompts:
            assert cache.prompt_k[0][p.row, 0, : p.computed, 0].tolist() == p.ids[: p.computed]


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules(seed):
    play = Play(seed)
    for _ in range(60):
        for _ in range(play.rng.choice((0, 0, 0, 1, 2))):
            play.submit()
        play.step()
    steps = 0
    while play.scheduler.live or play.scheduler.waiting:
        play.step()
        steps += 1
        assert steps < 5000
    assert play.ended == Counter((r.id, i) for r in play.submitted for i in range(len(r.keys)))
    assert not play.scheduler.prompts


def test_a_prompt_starts_from_the_longest_common_beginning():
    play = Play(0)
    play.scheduler.options = EngineOptions(prefill_chunk=1000)
    for name, prompt in (("a", [5] * 40), ("b", [5] * 20 + [6] * 20), ("c", [5] * 20 + [6] * 9 + [7])):
        play.scheduler.submit(small.request(name, prompt, max_tokens=30))
    play.scheduler.admit()
    step = play.scheduler.plan()
    assert step is not None
    assert [(s.start, s.count, s.donor) for s in step.segments] == [(0, 40, None), (20, 20, 0), (29, 1, 1)]


def test_reset_forgets_everything():
    play = Play(3)
    for _ in range(6):
        play.submit()
    play.step()
    play.scheduler.reset()
    assert not (play.scheduler.live or play.scheduler.waiting or play.scheduler.prompts)
    assert play.cache.bytes == 0
    play.submitted, play.ended = [], Counter()
    test = small.request("again", [1, 2], 2)
    play.scheduler.submit(test)
    while play.scheduler.live or play.scheduler.waiting:
        play.step()
    assert play.ended == Counter({("again", 0): 1, ("again", 1): 1})
