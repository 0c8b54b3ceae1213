"""Plain data as JSON: what may cross between tests and the code under test. Standard library only.

Its text is also run inside sandboxes. Only exact builtins come out of ``unpack``: no value brings methods
along, so that whoever compares it decides how it compares.
"""

import itertools

_ITEMS = 100_000
_SAFE = 1 << 53
_KINDS = {"l": list, "t": tuple, "S": set, "F": frozenset}


def pack(value, other=None):
    """JSON-ready form. ``other`` packs what is not plain; without it that is a TypeError."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -_SAFE < value < _SAFE else ["i", hex(value)]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).hex()]
    if isinstance(value, dict):
        return ["d", [[pack(k, other), pack(v, other)] for k, v in dict.items(value)]]
    for tag, kind in _KINDS.items():
        if isinstance(value, kind):
            return [tag, [pack(v, other) for v in kind.__iter__(value)]]  # pyright: ignore[reportArgumentType]
    if hasattr(type(value), "__next__") or isinstance(value, range | type({}.keys()) | type({}.values())):
        return ["l", [pack(v, other) for v in itertools.islice(value, _ITEMS)]]
    if other is None:
        raise TypeError(f"{type(value).__name__} is not plain data")
    return other(value)


def unpack(form, other=None):
    """The value of a JSON-ready form. Raises ValueError for anything else."""
    if form is None or isinstance(form, bool | int | float | str):
        return form
    if isinstance(form, list) and len(form) == 2:
        tag, body = form
        if tag in _KINDS:
            return _KINDS[tag](unpack(v, other) for v in body)
        if tag == "d":
            return {unpack(k, other): unpack(v, other) for k, v in body}
        if tag == "i":
            return int(body, 16)
        if tag == "b":
            return bytes.fromhex(body)
        if other is not None:
            return other(tag, body)
    if isinstance(form, list) and len(form) == 3 and form[0] == "c":
        return complex(form[1], form[2])
    raise ValueError("not plain data")
