"""msgpack between croze's processes: typed structs, numpy arrays included, no pickle.

An array travels as an extension of (dtype, shape, bytes) and arrives as a fresh, writable one; only plain
numeric, boolean, text and time dtypes do. A stream carries frames: a little-endian u32 length, then that many
bytes.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar, overload

import msgspec
import numpy as np

from croze.errors import DeclarationError

T = TypeVar("T")

_ARRAY = 1
_KINDS = "biufcSUmM"
FRAME_LIMIT = 1 << 30
"""Largest frame, bytes."""


def encode(value: Any) -> bytes:
    """Raises DeclarationError for what cannot travel: arbitrary objects, integers beyond 64 bits, endless
    nesting."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DeclarationError(
            f"this cannot be sent to another process: {error}",
            where="task columns",
            fix="use numbers, text, bytes, lists, dicts and numpy arrays",
        ) from error


@overload
def decode(data: bytes, kind: type[T]) -> T: ...
@overload
def decode(data: bytes, kind: Any) -> Any: ...
def decode(data: bytes, kind: Any) -> Any:
    """Raises msgspec.DecodeError (ValidationError included) for anything that is not a ``kind``."""
    return msgspec.msgpack.decode(data, type=kind, ext_hook=_from_extension, dec_hook=_convert)


def _to_extension(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _KINDS or value.dtype.fields:
            raise TypeError(f"an array of dtype {value.dtype}")
        header = (value.dtype.str, value.shape, value.tobytes())
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(header))
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"an object of type {type(value).__name__}")


def _from_extension(code: int, data: memoryview) -> np.ndarray:
    if code != _ARRAY:
        raise msgspec.ValidationError(f"unknown extension {code}")
    name, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], bytes])
    try:
        dtype = np.dtype(name)
        if dtype.kind not in _KINDS or dtype.fields or any(n < 0 for n in shape):
            raise ValueError(f"dtype {name!r}, shape {shape}")
        if not raw:
            return np.zeros(shape, dtype) if 0 in shape else np.frombuffer(raw, dtype).reshape(shape)
        return np.frombuffer(raw, dtype).reshape(shape).copy()
    except (TypeError, ValueError, SyntaxError, OverflowError) as error:
        raise msgspec.ValidationError(f"not an array: {error}") from error


def _convert(kind: type, value: Any) -> Any:
    if kind is np.ndarray and isinstance(value, np.ndarray):
        return value
    raise msgspec.ValidationError(f"expected {kind.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_extension)


def frame(data: bytes) -> bytes:
    """``data`` with its length in front."""
    if len(data) > FRAME_LIMIT:
        raise DeclarationError(
            f"a message of {len(data) >> 20} MiB",
            where="task columns",
            fix=f"keep it below {FRAME_LIMIT >> 20} MiB",
        )
    return len(data).to_bytes(4, "little") + data


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame's bytes; None at the end of the stream, wherever that comes."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "little")
        if size > FRAME_LIMIT:
            return None
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
