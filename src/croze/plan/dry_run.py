"""Code run on torch's meta device: every tensor has a shape and no content, and what would be in memory is counted.

Operations are counted where they are dispatched, so whatever allocates (autograd, hand-written backwards, library
code) is seen, and each storage is taken off when the last tensor over it dies: the peak is that of the real thing.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

REST = "rest"
"""The part of storages that nothing was said about."""


LARGE = 32 << 20
"""Bytes from which glibc gives a tensor pages of its own, and takes them back, whatever was freed before."""


@dataclass(slots=True)
class _Storage:
    """One piece of memory: its bytes, the shape it was first seen with, the events at which it came and went."""

    nbytes: int
    shape: torch.Size
    born: int
    part: str = REST
    died: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most memory that was live at once: bytes by part, and those of them in tensors below ``LARGE``."""

    parts: dict[str, int]
    small: dict[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())


class Ledger(TorchDispatchMode):
    """Live storages of ``device`` while it is entered: ``name`` says what they are for, ``peak`` what was most since
    ``watch``."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self._device = device
        self._live: dict[int, _Storage] = {}
        self._seen: list[_Storage] = []
        self._shapes = _Shapes()
        self._event = self._now = self._most = self._most_at = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: each of tens of thousands of operations would go through torch._dynamo."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = self._shapes(func, args, kwargs or {})
        for tensor in _tensors(out):
            if tensor.device.type == self._device:
                self._note(tensor)
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or not storage.nbytes():
            return
        self._event += 1
        made = _Storage(storage.nbytes(), tensor.shape, self._event)
        self._live[key] = made
        self._seen.append(made)
        self._now += made.nbytes
        if self._now > self._most:
            self._most, self._most_at = self._now, self._event
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        gone = self._live.pop(key)
        self._event += 1
        gone.died = self._event
        self._now -= gone.nbytes

    def name(self, part: str, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors' memory is ``part``, also for the time before."""
        for tensor in tensors:
            storage = self._live.get(tensor.untyped_storage()._cdata)
            if storage is not None:
                storage.part = part

    def watch(self) -> None:
        """From here on, look for the peak."""
        self._seen = list(self._live.values())
        self._most, self._most_at = self._now, self._event

    def peak(self, part_of: Callable[[torch.Size], str] = lambda _: REST) -> Peak:
        """The peak since ``watch``. ``part_of`` guesses from its shape the part of what nobody has named."""
        parts: Counter[str] = Counter()
        small: Counter[str] = Counter()
        for s in self._seen:
            if s.born <= self._most_at and (s.died is None or s.died > self._most_at):
                part = part_of(s.shape) if s.part == REST else s.part
                parts[part] += s.nbytes
                small[part] += s.nbytes if s.nbytes < LARGE else 0
        return Peak(parts=dict(parts), small=dict(small))


class _Shapes:
    """Operations on meta tensors, from memory where they were done before on tensors of the same form: layers are
    alike, and torch takes long to work out what a result looks like."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Any, ...]] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _PACKED and args[0].is_meta:
            return _PACKED[func](*args)
        if func._schema.is_mutable and torch.Tag.pointwise in func.tags:
            return kwargs["out"] if "out" in kwargs else args[0]  # it changes numbers, and there are none
        if func._schema.is_mutable or func.is_view:
            return func(*args, **kwargs)
        key = (func, _form(args), _form(tuple(kwargs.items())))
        if key in self._known:
            kind, forms = self._known[key]
            made = [_EMPTY(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in forms]
            return made[0] if kind is torch.Tensor else kind(made)
        out = func(*args, **kwargs)
        made = _tensors(out)
        given = {t.untyped_storage()._cdata for t in (*_tensors(args), *_tensors(kwargs.values()))}
        fresh = all(t.is_meta and t.untyped_storage()._cdata not in given for t in made)
        if fresh and len(made) == (len(out) if isinstance(out, tuple | list) else 1):
            kind = torch.Tensor if isinstance(out, torch.Tensor) else type(out)
            self._known[key] = kind, [(t.shape, t.stride(), t.dtype) for t in made]
        return out


_EMPTY = torch.ops.aten.empty_strided.default


def _form(value: Any) -> Any:
    """What of an argument decides the form of a result."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    return type(value), value  # 1, 1.0 and True are not the same


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, str) or not isinstance(value, Iterable):
        return []
    return [tensor for inner in value for tensor in _tensors(inner)]


def _packed_product(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_PACKED = {
    torch.ops.mkldnn._reorder_linear_weight.default: lambda weight, *_: torch.empty_like(weight),
    torch.ops.mkldnn._linear_pointwise.default: _packed_product,
}
"""The prepacked linear has no form on the meta device."""


class _Answers(TorchFunctionMode):
    """Questions about values, which meta tensors do not have: every number is 1, every condition true.

    Bytes are only ever asked for to be digested, and there are none.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ANSWERS and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return _ANSWERS[func](args[0])
        return func(*args, **(kwargs or {}))


def _array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.uint8:
        return np.empty(0, np.uint8)
    return np.ones(tuple(tensor.shape), np.float32)


_ANSWERS: dict[Any, Callable[[torch.Tensor], Any]] = {
    torch.Tensor.item: lambda _: 1.0,
    torch.Tensor.__float__: lambda _: 1.0,
    torch.Tensor.__int__: lambda _: 1,
    torch.Tensor.__bool__: lambda _: True,
    torch.Tensor.tolist: lambda tensor: _array(tensor).tolist(),
    torch.Tensor.numpy: _array,
    torch.Tensor.cpu: lambda tensor: tensor,
}


@contextmanager
def dry_run() -> Iterator[Ledger]:
    """Tensors made inside are on the meta device, unless their device is named; nothing of their size is touched."""
    ledger = Ledger()
    with torch.device("meta"), ledger, _Answers():
        yield ledger
