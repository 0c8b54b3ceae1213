"""Which calls wait, which are under way, who is to blame when the worker is lost. Decisions only, no I/O."""

from __future__ import annotations

from collections import Counter, deque

_TRIES = 3


class Desk:
    """Calls are numbers. At most ``limit`` are under way; a suspect runs alone, so that its end is its own.

    When the worker is lost, everything under way is lost with it. If who did it is known, the others go again
    as if nothing had been. If not, all that were under way are suspects, and each goes again by itself:
    whoever then loses the worker did it. A call that lost its worker three times is given up, whoever did it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[int] = deque()
        self._suspects: deque[int] = deque()
        self._alone = False
        self._tries: Counter[int] = Counter()
        self.under_way: set[int] = set()

    def add(self, call: int) -> None:
        self._waiting.append(call)

    def next(self) -> list[int]:
        """Calls to start now."""
        if self.under_way and (self._alone or self._suspects):
            return []
        self._alone = bool(self._suspects)
        if self._alone:
            started = [self._suspects.popleft()]
        else:
            room = min(len(self._waiting), self._limit - len(self.under_way))
            started = [self._waiting.popleft() for _ in range(room)]
        self._tries.update(started)
        self.under_way.update(started)
        return started

    def done(self, call: int) -> None:
        self.under_way.discard(call)
        self._tries.pop(call, None)

    def lost(self, guilty: set[int]) -> set[int]:
        """The worker is gone, by the doing of ``guilty`` if that is known. Who is given up."""
        lost, self.under_way = self.under_way, set()
        blamed = lost & guilty or (lost if len(lost) == 1 else set())
        worn = {call for call in lost - blamed if self._tries[call] >= _TRIES}
        again = sorted(lost - blamed - worn)
        if blamed:
            self._waiting.extendleft(reversed(again))
        else:
            self._suspects.extend(again)
        return blamed | worn
