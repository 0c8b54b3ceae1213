"""Choosing a driver, and failing closed: without isolation nothing runs unless that was allowed."""

from __future__ import annotations

import logging
from typing import Literal

from croze.errors import SandboxUnavailable
from croze.sandbox.bubblewrap import Bubblewrap
from croze.sandbox.protocol import Driver
from croze.sandbox.unsafe import Unsafe

_log = logging.getLogger("croze.sandbox")

DriverName = Literal["auto", "bubblewrap", "unsafe"]


async def open_driver(name: DriverName = "auto", *, allow_unsafe: bool = False) -> Driver:
    """A driver that has just shown that it works, by starting one sandbox.

    "auto" is the strongest that works here: bubblewrap, else plain subprocesses where ``allow_unsafe`` says
    so. Raises SandboxUnavailable with what is missing and what to do.
    """
    if name == "unsafe":
        if not allow_unsafe:
            raise SandboxUnavailable(
                "the unsafe driver does not isolate anything",
                where="sandbox",
                fix="set sandbox.allow_unsafe=true to run model-written code as this user",
            )
        return _unsafe("it was asked for")
    try:
        return await _proven()
    except SandboxUnavailable as error:
        if name == "auto" and allow_unsafe:
            return _unsafe(error.message)
        raise


def _unsafe(why: str) -> Driver:
    _log.warning(
        "sandbox.allow_unsafe: model-written code runs WITHOUT isolation, as this user (driver unsafe): %s",
        why,
    )
    return Unsafe()


async def _proven() -> Driver:
    driver = Bubblewrap()
    try:
        sandbox = await driver.create()
        await sandbox.destroy()
    except BaseException:
        await driver.close()
        raise
    return driver
