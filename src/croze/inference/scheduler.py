"""Who decodes, who is prefilled, who waits: sequences join and leave at token boundaries."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from croze.config import EngineOptions
from croze.errors import UsageError
from croze.inference.attention import Decoding
from croze.inference.cache import KVCache, Segment
from croze.inference.protocol import Request
from croze.types import Finish

LEAST_COMMON = 16
"""Tokens two prompts must begin with alike for the KV of one to be copied to the other."""


def common_prefix(one: list[int], other: list[int]) -> int:
    """Tokens that both begin with, at least one of ``other`` left to be computed."""
    most = min(len(one), len(other) - 1)
    if one[:most] == other[:most]:
        return most
    return next(i for i in range(most) if one[i] != other[i])


@dataclass(slots=True, eq=False)
class Prompt:
    """A group's shared prompt in the pool: ``row`` there, tokens computed so far, siblings still alive."""

    request: Request
    row: int
    ids: list[int]
    computed: int = 0
    alive: int = 0
    stale: bool = False
    """Whether some of its KV comes from weights served before; it is lent to nobody."""

    @property
    def ready(self) -> bool:
        return self.computed == len(self.ids)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sibling. ``suffix``: all tokens after the prompt; ``computed``: how many of them have their KV;
    ``first``: how many came with the request; ``room``: most tokens the suffix may grow to."""

    prompt: Prompt
    sibling: int
    suffix: list[int]
    first: int
    room: int
    context_bound: bool
    computed: int = 0
    waited_s: float = 0.0
    fresh_ids: list[int] = field(default_factory=list)
    fresh_logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def request(self) -> Request:
        return self.prompt.request

    @property
    def key(self) -> int:
        return self.request.keys[self.sibling]

    @property
    def pending(self) -> int:
        """Given tokens (earlier turns) still to be computed before this sibling can decode."""
        return self.first - self.computed if self.computed < self.first else 0

    @property
    def decoding(self) -> bool:
        return self.prompt.ready and self.pending == 0 and len(self.suffix) > self.first


@dataclass(slots=True, eq=False)
class Arrival:
    """Siblings of a request that enter together: all of them where memory can hold them. ``held``: whether there
    was no room for them at first; ``since``: monotonic seconds when they came."""

    request: Request
    siblings: range
    since: float = field(default_factory=time.monotonic)
    held: bool = False

    @property
    def id(self) -> str:
        return self.request.id


@dataclass(slots=True)
class Step:
    """One forward: decoding rows, chunks, and which sequences get a token from which row of the flat batch."""

    decoding: Decoding
    segments: list[Segment]
    ids: list[int]
    positions: list[int]
    rows: list[int]
    takers: list[list[Sequence]]


class Scheduler:
    """Requests in order of arrival. A group enters whole, once its siblings and its KV memory have room; one too
    large ever to fit whole enters in parts, one after the other.

    Slots 0..len(live)-1 are the live sequences; those that decode come first. A leaver's place is taken by the
    last, so that slots, and rows of prompts, stay dense.
    """

    def __init__(self, cache: KVCache, options: EngineOptions, context: int) -> None:
        self.cache, self.options, self.context = cache, options, context
        self.waiting: deque[Arrival] = deque()
        self.live: list[Sequence] = []
        self.prompts: list[Prompt] = []

    def weights_changed(self) -> None:
        """KV computed so far belongs to older weights."""
        for prompt in self.prompts:
            prompt.stale = prompt.computed > 0

    def reset(self) -> None:
        """Forget all requests, waiting and live."""
        self.waiting.clear()
        self.live.clear()
        self.prompts.clear()
        self.cache.clear()

    def submit(self, request: Request) -> None:
        """Queue a request, or say at once why it can never run."""
        longest = max((len(s) for s in request.suffixes), default=0)
        prompt, count = len(request.prompt_P), len(request.keys)
        if prompt + longest >= self.context:
            raise UsageError(
                f"the prompt has {prompt + longest} tokens, the model's context {self.context}",
                where=f"request {request.id}",
                fix="shorten the prompt or choose a model with a longer context",
            )
        at_once = self._largest_part(request)
        if at_once == 0:
            needed = self.cache.smallest(prompt, 1, self._suffix_room(request))
            raise UsageError(
                f"one rollout needs {needed >> 20} MiB of KV memory, engine.kv_memory_mib is "
                f"{self.cache.limit_bytes >> 20}",
                where=f"request {request.id}",
                fix="raise engine.kv_memory_mib, or lower sampling.max_tokens",
            )
        for start in range(0, count, at_once):
            self.waiting.append(Arrival(request, range(start, min(start + at_once, count))))

    def _largest_part(self, request: Request) -> int:
        """How many siblings of ``request`` can be live at once when nothing else is."""
        prompt, room = len(request.prompt_P), self._suffix_room(request)
        count = min(len(request.keys), self.options.max_rows)
        while count and self.cache.smallest(prompt, count, room) > self.cache.limit_bytes:
            count -= 1
        return count

    def _suffix_room(self, request: Request) -> int:
        longest = max((len(s) for s in request.suffixes), default=0)
        return min(longest + request.params.max_tokens, self.context - len(request.prompt_P))

    def admit(self) -> None:
        while self.waiting and self._make_room(self.waiting[0]):
            self._enter(self.waiting.popleft())
        for arrival in reversed(self.waiting):
            if arrival.held:
                break
            arrival.held = True

    def _make_room(self, arrival: Arrival) -> bool:
        """Reserve what ``arrival`` needs, where there is room for it."""
        count = len(arrival.siblings)
        if len(self.live) + count > self.options.max_rows:
            return False
        need = (
            len(self.prompts) + 1,
            len(arrival.request.prompt_P),
            len(self.live) + count,
            self._suffix_room(arrival.request),
        )
        if not self.cache.fits(*need) and not self.live:
            self.cache.clear()
        if not self.cache.fits(*need):
            return False
        self.cache.reserve(*need)
        return True

    def _enter(self, arrival: Arrival) -> None:
        request = arrival.request
        prompt = Prompt(request, len(self.prompts), request.prompt_P.tolist(), alive=len(arrival.siblings))
        self.prompts.append(prompt)
        waited_s = time.monotonic() - arrival.since if arrival.held else 0.0
        for sibling in arrival.siblings:
            given = request.suffixes[sibling].tolist() if request.suffixes else []
            left = self.context - len(prompt.ids) - len(given)
            most = min(request.params.max_tokens, left)
            self.live.append(
                Sequence(
                    prompt,
                    sibling,
                    given,
                    first=len(given),
                    room=len(given) + most,
                    context_bound=left < request.params.max_tokens,
                    waited_s=waited_s,
                )
            )

    def plan(self) -> Step | None:
        """The next forward, or None when nothing is live."""
        if not self.live:
            return None
        budget = self.options.prefill_chunk
        ready = self.live[: self._arrange()]
        step = Step(
            decoding=Decoding(
                positions=[len(s.suffix) - 1 for s in ready],
                prompts=[s.prompt.row for s in ready],
                prompt_lens=[len(s.prompt.ids) for s in ready],
            ),
            segments=[],
            ids=[s.suffix[-1] for s in ready],
            positions=[len(s.prompt.ids) + len(s.suffix) - 1 for s in ready],
            rows=list(range(len(ready))),
            takers=[[s] for s in ready],
        )
        for s in ready:
            s.computed += 1
        by_prompt: dict[Prompt, list[Sequence]] = {}
        for s in self.live:
            by_prompt.setdefault(s.prompt, []).append(s)
        for prompt in self.prompts:
            if budget <= 0:
                break
            if not prompt.ready:
                budget -= self._prompt_chunk(step, prompt, budget, by_prompt[prompt])
            if prompt.ready:
                for s in by_prompt[prompt]:
                    if s.pending and budget > 0:
                        budget -= self._suffix_chunk(step, s, budget)
        return step

    def _prompt_chunk(self, step: Step, prompt: Prompt, budget: int, siblings: list[Sequence]) -> int:
        donor = self._donor(prompt) if prompt.computed == 0 else None
        start = prompt.computed if donor is None else common_prefix(donor.ids, prompt.ids)
        count = min(budget, len(prompt.ids) - start)
        step.segments.append(
            Segment(
                prompt=prompt.row,
                prompt_len=len(prompt.ids),
                slot=None,
                start=start,
                count=count,
                donor=None if donor is None else donor.row,
            )
        )
        step.ids += prompt.ids[start : start + count]
        step.positions += range(start, start + count)
        prompt.computed = start + count
        if prompt.ready:
            takers = [s for s in siblings if s.first == 0]
            if takers:
                step.rows.append(len(step.ids) - 1)
                step.takers.append(takers)
        return count

    def _donor(self, prompt: Prompt) -> Prompt | None:
        """The prompt in memory, or computed earlier in this step, that begins most like this one."""
        best, most = None, LEAST_COMMON - 1
        for other in self.prompts:
            if other.stale:
                continue
            common = common_prefix(other.ids, prompt.ids)
            if most < common <= other.computed:
                best, most = other, common
        return best

    def _suffix_chunk(self, step: Step, s: Sequence, budget: int) -> int:
        start, count = s.computed, min(budget, s.pending)
        p = len(s.prompt.ids)
        step.segments.append(
            Segment(prompt=s.prompt.row, prompt_len=p, slot=self.live.index(s), start=start, count=count)
        )
        step.ids += s.suffix[start : start + count]
        step.positions += range(p + start, p + start + count)
        s.computed += count
        if s.pending == 0:
            step.rows.append(len(step.ids) - 1)
            step.takers.append([s])
        return count

    def settle(self) -> list[Sequence]:
        """Remove finished sequences and prompts that nobody needs any more; returns the removed."""
        gone = [s for s in self.live if s.finish is not None]
        if gone:
            for s in gone:
                self._remove(self.live.index(s))
                s.prompt.alive -= 1
            for prompt in [p for p in self.prompts if p.alive == 0]:
                self._remove_prompt(prompt)
        return gone

    def _remove(self, slot: int) -> None:
        last = len(self.live) - 1
        if slot != last:
            self.live[slot] = self.live[last]
            self.cache.move_suffix(last, slot, self.live[slot].computed)
        self.live.pop()

    def _remove_prompt(self, prompt: Prompt) -> None:
        hole, last = prompt.row, len(self.prompts) - 1
        if hole != last:
            moved = self.prompts[hole] = self.prompts[last]
            moved.row = hole
            self.cache.move_prompt(last, hole, moved.computed)
        self.prompts.pop()

    def _arrange(self) -> int:
        """Decoding sequences into slots 0..n-1; returns n."""
        decoders = sum(s.decoding for s in self.live)
        holes = [i for i in range(decoders) if not self.live[i].decoding]
        strays = [i for i in range(decoders, len(self.live)) if self.live[i].decoding]
        for hole, stray in zip(holes, strays, strict=True):
            a, b = self.live[hole], self.live[stray]
            self.cache.swap_suffixes(hole, stray, max(a.computed, b.computed))
            self.live[hole], self.live[stray] = b, a
        return decoders
