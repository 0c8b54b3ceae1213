"""Packages that are verbs too: ``croze.train`` holds the trainer, and ``croze.train(run)`` trains.

Python binds a package to its name in the parent as soon as anything imports it, so the name cannot also be a
plain function. The package object itself is made callable instead.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def callable_package(name: str, home: str, verb: str) -> None:
    """Calling package ``name`` calls ``verb`` of the module ``home``, imported when first called."""

    class Package(ModuleType):
        def __call__(self, *args: Any, **options: Any) -> Any:
            return getattr(importlib.import_module(home), verb)(*args, **options)

    sys.modules[name].__class__ = Package
