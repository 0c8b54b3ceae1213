"""What is installed here and whether it works: Python, packages, torch, its devices, exactness, isolation, the hub."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from croze.models.builtin import BUILTINS
from croze.plan import machine
from croze.plan.checks import Report, finish
from croze.sandbox import drivers

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from croze.sandbox.protocol import Driver, ExecResult

CROZE = "croze"
EXTRAS = {"lora": "adapters", "data": "datasets of the hub", "gym": "reasoning-gym tasks"}
"""Extras that a user may want, with what for."""
_SHOWN = ("torch", "transformers", "safetensors", "pyarrow", "duckdb")
_TINY = "tiny-calc"
_LAYERS = {
    "cgroup memory": "give croze a cgroup of its own: systemd-run --user --scope -p Delegate=yes croze ...",
    "cgroup pids": "give croze a cgroup of its own: systemd-run --user --scope -p Delegate=yes croze ...",
    "seccomp": f"run on x86_64 or aarch64; this is {platform.machine()}",
    "own user": "start croze as root, for example as root of a container, if model code must not share your user",
}
"""What makes up for a layer of isolation that a machine does not give."""


def look_at_python(_: Any, report: Report) -> None:
    from packaging.specifiers import SpecifierSet

    wanted = _metadata("Requires-Python") or ">=3.11"
    told = f"{platform.python_implementation()} {platform.python_version()}"
    if SpecifierSet(wanted).contains(platform.python_version(), prereleases=True):
        report.ok(told, where=sys.executable)
    else:
        report.fail(
            "python",
            f"{told}, and croze wants {wanted}",
            where=sys.executable,
            fix=f"make an environment with Python {wanted}",
        )


def look_at_packages(_: Any, report: Report) -> None:
    """Every package that croze depends on: there, and as new as it must be."""
    required = list(requirements())
    if not required:
        report.warn(
            "packages.unknown",
            "croze is not installed, only found: what it depends on is not known",
            where=str(Path(__file__).parents[1]),
            fix="pip install -e . in its source tree",
        )
    for requirement in required:
        _look_at_package(requirement, report)
    if required and not report.findings:
        shown = [f"{name} {version}" for name in _SHOWN if (version := installed(name))]
        report.ok(f"all {len(required)} as they must be: {', '.join(shown)}")


def _look_at_package(requirement: Requirement, report: Report) -> None:
    have = installed(requirement.name)
    if have is not None and requirement.specifier.contains(have, prereleases=True):
        return
    report.fail(
        "packages.missing" if have is None else "packages.version",
        f"{requirement.name} is not installed"
        if have is None
        else f"{requirement.name} is {have}, and croze wants {requirement.specifier}",
        where=requirement.name,
        fix=f"pip install '{requirement.name}{_extras(requirement)}{requirement.specifier}'",
    )


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def requirements(extra: str = "") -> Iterator[Requirement]:
    """What croze depends on here, or what one of its extras adds; nothing where croze is not installed."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires(CROZE) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for line in lines:
        requirement = Requirement(line)
        always = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if always if not extra else not always and requirement.marker.evaluate({"extra": extra}):  # pyright: ignore[reportOptionalMemberAccess]
            yield requirement


def installed(name: str) -> str | None:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def look_at_torch(_: Any, report: Report) -> None:
    """Whether torch and transformers can be imported at all: their own libraries may be missing."""
    for name in ("torch", "transformers"):
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            report.fail(
                "torch.import",
                f"{name} cannot be imported: {error}",
                where=name,
                fix=f"pip install --force-reinstall {name}",
            )
    if not report.findings:
        import torch

        report.ok(f"torch {torch.__version__} is built for {_build()}")


def _build() -> str:
    import torch

    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"


def look_at_cuda(_: Any, report: Report) -> None:
    """Devices that torch finds, and those that it should."""
    import torch

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(number)
            report.ok(f"cuda:{number} {device.name}, {device.total_memory / (1 << 30):.0f} GiB")
    elif Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia/version").exists():
        report.warn(
            "cuda.unused",
            f"there is a CUDA device, and torch, which is built for {_build()}, does not find it",
            where="torch",
            fix="install the torch build for your driver's CUDA: https://pytorch.org/get-started/locally/",
        )
    else:
        report.ok("no CUDA device: models compute on the CPU")


def look_at_arithmetic(_: Any, report: Report) -> None:
    """What engine.dtype=auto is here."""
    import torch

    from croze.models.numerics import default_dtype

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if default_dtype(device) == torch.bfloat16:
        report.ok(f"bfloat16 on {device}: the hardware multiplies it")
    else:
        report.ok(f"float32 on {device}: the hardware does not multiply bfloat16")


def look_at_exactness(_: Any, report: Report) -> None:
    """The engine's own measurement, on the shapes of a small model: do rows depend on their neighbours."""
    from croze.models.architecture import read_architecture
    from croze.models.numerics import choose, remedy
    from croze.models.source import resolve

    arch = read_architecture(resolve(_TINY).path)
    recipe = choose(arch, "auto", "cpu", True)
    if recipe.exact:
        report.ok(
            f"on the CPU engine and trainer agree bit for bit ({_TINY}; measured for each model at its start)"
        )
    else:
        report.warn(
            "exactness",
            recipe.note,
            where="engine.self_check",
            fix=remedy(recipe),
        )


def look_at_isolation(_: Any, report: Report) -> None:
    """A sandbox that is really started, a program that really runs in it, and what this machine does not give."""

    async def probe() -> tuple[Driver, ExecResult]:
        driver = await drivers.open_driver(drivers.ISOLATING)
        try:
            sandbox = await driver.create()
            return driver, await sandbox.exec_python("print(6 * 7)")
        finally:
            await driver.close()

    driver, result = finish(probe())
    if result.text.strip() != "42":
        report.fail(
            "sandbox",
            f"a program in a sandbox ended as {result.status}: {result.error_text.strip()[-200:]}",
            where=driver.name,
            fix="set sandbox.driver to another one",
        )
        return
    report.ok(f"driver {driver.name}, tier {driver.tier}: a program ran in {result.wall_ms:.0f} ms")
    for layer in driver.missing:
        report.warn(
            f"sandbox.{layer.replace(' ', '_')}",
            f"this machine gives no {layer}",
            where=driver.name,
            fix=_LAYERS.get(layer),
        )


def look_at_extras(_: Any, report: Report) -> None:
    """What is optional: there or not, and new enough."""
    for extra, what in EXTRAS.items():
        for requirement in requirements(extra):
            have = installed(requirement.name)
            if have is None:
                report.ok(f"no {requirement.name}; for {what}: pip install '{CROZE}[{extra}]'")
            elif requirement.specifier.contains(have, prereleases=True):
                report.ok(f"{requirement.name} {have}")
            else:
                report.warn(
                    "extras.version",
                    f"{requirement.name} is {have}, and croze wants {requirement.specifier}",
                    where=requirement.name,
                    fix=f"pip install '{CROZE}[{extra}]'",
                )


def look_at_hub(_: Any, report: Report) -> None:
    """Where models of the hub are kept, and whether it may be asked. It is not asked now."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    kept = len(list(cache.glob("models--*")))
    there = machine.existing(cache)
    offline = constants.HF_HUB_OFFLINE
    told = f"{kept} models kept; {'offline: HF_HUB_OFFLINE is set' if offline else 'others are fetched when asked for'}"
    if not os.access(there, os.W_OK | os.X_OK):
        report.warn(
            "hub.readonly",
            f"models of the hub cannot be kept: {there} cannot be written",
            where=str(cache),
            fix="set HF_HOME to a folder that you may write to",
        )
    else:
        report.ok(f"{told}; built in: {', '.join(BUILTINS)}", where=str(cache))


def _metadata(field: str) -> str | None:
    try:
        return importlib.metadata.metadata(CROZE)[field]
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return None
