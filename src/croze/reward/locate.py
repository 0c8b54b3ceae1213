"""How a reward function travels to another process: as the file that defines it and a name in that file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from types import ModuleType
from typing import Any

import msgspec

from croze.errors import DeclarationError

TOP_LEVEL = "define a function with `def` or `async def` at the top level of a file, and give that"


class FunctionRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a function is defined. ``path`` is the sender's sys.path, on which the file may depend."""

    file: str
    module: str
    qualname: str
    path: tuple[str, ...] = ()


def locate(fn: Any) -> FunctionRef:
    """A reference to ``fn``. Raises DeclarationError for one that no other process could find again."""
    qualname = getattr(fn, "__qualname__", "")
    module = getattr(fn, "__module__", "") or ""
    where, fix = place(fn), TOP_LEVEL
    if not inspect.isfunction(fn):
        raise DeclarationError(
            f"a reward must be a function, not an object of type {type(fn).__name__}", where=where, fix=fix
        )
    if "<" in qualname or "." in qualname:
        kind = "a lambda" if "<lambda>" in qualname else "defined inside something else"
        raise DeclarationError(
            f"the reward is {kind}: its worker process cannot find it", where=where, fix=fix
        )
    file = inspect.unwrap(fn).__code__.co_filename
    if not os.path.isfile(file):
        raise DeclarationError(f"the reward comes from {file}, which is no file", where=where, fix=fix)
    path = tuple(os.path.abspath(p) for p in sys.path)
    return FunctionRef(file=os.path.abspath(file), module=module, qualname=qualname, path=path)


def place(fn: Any) -> str:
    """Which reward, and where it is defined, as far as Python knows: "reward NAME (FILE:LINE)"."""
    name, line = getattr(fn, "__qualname__", type(fn).__name__), first_line(fn)
    return f"reward {name} ({line})" if line else f"reward {name}"


def first_line(fn: Any) -> str:
    """``FILE:LINE`` where a function is defined; empty for what is none."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def load(ref: FunctionRef) -> Any:
    """The function, in this process. Whatever the file raises when imported, this raises."""
    here = set(map(os.path.abspath, sys.path))
    sys.path.extend(p for p in ref.path if p not in here)
    module = _importable(ref) or _from_file(ref.file)
    fn = getattr(module, ref.qualname, None)
    if not callable(fn):
        raise DeclarationError(
            f"{ref.file} defines no {ref.qualname!r} when imported",
            where=f"reward {ref.qualname}",
            fix='define it outside of `if __name__ == "__main__"`',
        )
    return fn


def _importable(ref: FunctionRef) -> ModuleType | None:
    """The module by its own name, where that name leads to the same file."""
    if ref.module in ("", "__main__"):
        return None
    try:
        spec = importlib.util.find_spec(ref.module)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or os.path.realpath(spec.origin) != os.path.realpath(ref.file):
        return None
    return importlib.import_module(ref.module)


def _from_file(file: str) -> ModuleType:
    """The file as a module that is not ``__main__``, its directory importable."""
    name = "croze_task_" + hashlib.sha256(os.path.realpath(file).encode()).hexdigest()[:12]
    if name in sys.modules:
        return sys.modules[name]
    folder = os.path.dirname(file)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise DeclarationError(f"{file} is no Python file", where=file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
