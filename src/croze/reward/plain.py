"""Plain data as JSON: what may cross between tests and the code under test. Standard library only.

Its text is also run inside sandboxes. Only exact types of the standard library come out of ``unpack``: no value
brings methods along, so that whoever compares it decides how it compares.
"""

import collections
import datetime
import decimal
import fractions
import json

_SAFE = 1 << 53
_KINDS = {"l": list, "t": tuple, "S": set, "F": frozenset, "q": collections.deque}
_VIEWS = range | type({}.keys()) | type({}.values()) | type({}.items())
_TEXTS = {
    "D": (decimal.Decimal, decimal.Decimal.__str__, decimal.Decimal),
    "/": (fractions.Fraction, fractions.Fraction.__str__, fractions.Fraction),
    "dt": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "da": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "tm": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
}
"""Tag to type, its text and back; a subclass stands before its base."""


def pack(value, other=None):
    """JSON-ready form. ``other`` packs what is not plain; without it, and for members of sets and keys of
    dicts, that is a TypeError."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -_SAFE < value < _SAFE else ["i", hex(value)]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return ["c", [value.real, value.imag]]
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).hex()]
    if isinstance(value, dict):
        return ["d", [[pack(k), pack(v, other)] for k, v in dict.items(value)]]
    if isinstance(value, set | frozenset):
        kind = set if isinstance(value, set) else frozenset
        # Their order differs from process to process, and the same value is to have one form.
        members = sorted((pack(v) for v in kind.__iter__(value)), key=json.dumps)  # pyright: ignore[reportArgumentType]
        return ["S" if kind is set else "F", members]
    if isinstance(value, tuple) and isinstance(fields := getattr(type(value), "_fields", None), tuple):
        return ["n", [type(value).__name__, list(fields), [pack(v, other) for v in tuple.__iter__(value)]]]
    for tag, kind in _KINDS.items():
        if isinstance(value, kind):
            return [tag, [pack(v, other) for v in kind.__iter__(value)]]  # pyright: ignore[reportArgumentType]
    return _pack_rare(value, other)


def _pack_rare(value, other):
    if isinstance(value, _VIEWS):
        return ["l", [pack(v, other) for v in value]]
    for tag, (kind, text, _) in _TEXTS.items():
        if isinstance(value, kind):
            return [tag, text(value)]  # pyright: ignore[reportArgumentType]
    if isinstance(value, datetime.timedelta):
        return ["td", [value.days, value.seconds, value.microseconds]]
    if isinstance(value, slice):
        return ["s", [pack(v) for v in (value.start, value.stop, value.step)]]
    if other is None:
        raise TypeError(f"{type(value).__name__} is not plain data")
    return other(value)


def unpack(form, other=None):
    """The value of a JSON-ready form. Raises ValueError or TypeError for anything else."""
    if form is None or isinstance(form, bool | int | float | str):
        return form
    if not (isinstance(form, list) and len(form) == 2 and isinstance(form[0], str)):
        raise ValueError("not plain data")
    tag, body = form
    if tag in _KINDS:
        return _KINDS[tag](unpack(v, other) for v in body)
    if tag == "d":
        return {unpack(k, other): unpack(v, other) for k, v in body}
    if tag == "n":
        name, fields, values = body
        return collections.namedtuple(name, fields)(*(unpack(v, other) for v in values))
    try:
        return _unpack_rare(tag, body, other)
    except ArithmeticError as error:
        raise ValueError("not plain data") from error


def _unpack_rare(tag, body, other):
    if tag == "i":
        return int(body, 16)
    if tag == "b":
        return bytes.fromhex(body)
    if tag == "c":
        return complex(*body)
    if tag in _TEXTS:
        return _TEXTS[tag][2](body)
    if tag == "td":
        return datetime.timedelta(*body)
    if tag == "s":
        return slice(*(unpack(v) for v in body))
    if other is None:
        raise ValueError("not plain data")
    return other(tag, body)
