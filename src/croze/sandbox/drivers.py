"""Choosing a driver, and failing closed: without isolation nothing runs unless that was allowed."""

from __future__ import annotations

import logging
from typing import get_args

from croze import plugins
from croze.errors import CrozeError, PluginError, SandboxFault, SandboxUnavailable
from croze.sandbox.protocol import Driver, Tier

_log = logging.getLogger("croze.sandbox")

ISOLATING = "bubblewrap"
"""What "auto" tries; where it does not work only plain subprocesses are left."""


async def open_driver(name: str = plugins.AUTO, *, allow_unsafe: bool = False) -> Driver:
    """A driver that has just shown that it works, by starting one sandbox.

    ``name``: one in the entry point group ``croze.sandbox``; its factory takes no arguments. "auto" is the
    strongest of croze's own that works here: bubblewrap, else plain subprocesses where ``allow_unsafe`` says so.
    A driver whose tier is "unsafe" always needs that word.

    Raises SandboxUnavailable with what is missing and what to do, ConfigError for an unknown name, PluginError for
    an installed driver that is none.
    """
    if name != plugins.AUTO:
        return await _opened(name, allow_unsafe, "it was asked for")
    try:
        return await _opened(ISOLATING, allow_unsafe, "")
    except SandboxUnavailable as error:
        if not allow_unsafe:
            raise
        return await _opened("unsafe", allow_unsafe, error.message)


async def _opened(name: str, allow_unsafe: bool, why: str) -> Driver:
    driver: Driver = plugins.make("croze.sandbox", name, keeps=Driver)
    try:
        _check_tier(name, driver, allow_unsafe)
        sandbox = await driver.create()
        await sandbox.destroy()
    except CrozeError:
        await driver.close()
        raise
    except Exception as error:  # supervision boundary: a driver may be code of others
        await driver.close()
        raise SandboxFault(
            f"the driver {name!r} cannot start a sandbox: {type(error).__name__}: {error}", where="sandbox"
        ) from error
    except BaseException:
        await driver.close()
        raise
    if driver.tier == "unsafe":
        _log.warning(
            "sandbox.allow_unsafe: model-written code runs WITHOUT isolation, as this user (driver %s): %s",
            name,
            why,
        )
    return driver


def _check_tier(name: str, driver: Driver, allow_unsafe: bool) -> None:
    if driver.tier not in get_args(Tier):
        raise PluginError(
            f"the sandbox driver {name!r} claims the tier {driver.tier!r}",
            where="sandbox.driver",
            fix=f"its tier must be one of {', '.join(get_args(Tier))}",
        )
    if driver.tier == "unsafe" and not allow_unsafe:
        raise SandboxUnavailable(
            f"the {name} driver does not isolate anything",
            where="sandbox",
            fix="set sandbox.allow_unsafe=true to run model-written code as this user",
        )
