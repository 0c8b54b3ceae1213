"""Plug-ins: the parts of a run by name, found through entry points, croze's own among them.

An entry point group has the name of the package whose protocol its members keep. Each entry point names a factory:

    group                     key              factory                            gives (protocol)
    croze.sandbox             sandbox.driver   ()                                 sandbox.protocol.Driver
    croze.inference           engine.name      (inference.protocol.EngineParts)   inference.protocol.Engine
    croze.train               optim.trainer    (train.protocol.TrainerParts)      train.protocol.Trainer
    croze.train.algorithms    algo.name        (config.Algo)                      train.algorithms.rule.Rule

Nothing is looked up, and no plug-in imported, before a run wants it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from croze.config import suggest
from croze.errors import ConfigError, CrozeError, InfraFault, PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

KEYS = {
    "croze.sandbox": "sandbox.driver",
    "croze.inference": "engine.name",
    "croze.train": "optim.trainer",
    "croze.train.algorithms": "algo.name",
}
"""Every group, with the key that chooses from it."""
AUTO = "auto"
"""What a key says that leaves the choice to croze; no plug-in can have this name."""


def names(group: str) -> list[str]:
    """What is installed in a group, sorted."""
    return sorted({point.name for point in _points(group)} - {AUTO})


def check(group: str, name: str) -> None:
    """Raise ConfigError unless ``name`` is installed in ``group``. Imports no plug-in."""
    _find(group, name)


def check_keys(values: Mapping[str, Any]) -> None:
    """``check`` every key that chooses a plug-in. ``values``: of all keys, as ``Run.keys`` gives them."""
    for group, key in KEYS.items():
        if values[key] != AUTO or group == "croze.train.algorithms":
            check(group, values[key])


def make(group: str, name: str, *parts: Any, keeps: type) -> Any:
    """Call the factory ``name`` of ``group`` with ``parts``.

    ``keeps``: the protocol whose members the result must have. Raises ConfigError for an unknown name, PluginError
    for a plug-in that cannot be imported, fails, or makes something else, InfraFault where memory is wanting; a
    CrozeError of its own goes through.
    """
    point = _find(group, name)
    try:
        made = point.load()(*parts)
    except CrozeError:
        raise
    except Exception as error:  # supervision boundary: a plug-in is code of others
        if _out_of_memory(error):
            raise InfraFault(
                f"there is not enough memory: {error}",
                where=KEYS[group],
                fix="`croze check` says how much a run needs: choose a smaller model, or lora.rank=16",
            ) from error
        raise _unusable(group, point, f"fails: {type(error).__name__}: {error}") from error
    lacks = [member for member in _members(keeps) if not hasattr(made, member)]
    if lacks:
        raise _unusable(group, point, f"gave a {type(made).__name__}, which has no {', '.join(lacks)}")
    return made


def _find(group: str, name: str) -> EntryPoint:
    found = [point for point in _points(group) if point.name == name]
    if len({point.value for point in found}) > 1:
        raise PluginError(
            f"several packages call their plug-in {name!r}: {', '.join(sorted(map(_owner, found)))}",
            where=KEYS[group],
            fix="uninstall all but one",
        )
    if found and name != AUTO:
        return found[0]
    known = names(group)
    if not known:
        raise PluginError(
            f"croze's own plug-ins of the group {group} are not registered",
            where=KEYS[group],
            fix="install croze (pip install croze, or pip install -e . in its source tree)",
        )
    raise ConfigError(
        f"{KEYS[group]} wants one of {', '.join(known)}, got {name!r}",
        where=KEYS[group],
        fix=suggest(name, known) or f"a package may register more in the entry point group {group}",
    )


def _points(group: str) -> list[EntryPoint]:
    """Entry points of a group. In a source tree croze's own come from its pyproject.toml: installed metadata may be
    missing there, or older."""
    from importlib.metadata import entry_points  # slow to import, and most programs look nothing up

    own = list(_source_tree(group))
    installed = entry_points(group=group)
    return [*own, *(point for point in installed if not own or _owner(point) != "croze")]


def _source_tree(group: str) -> Iterator[EntryPoint]:
    path = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if not path.is_file():
        return
    import tomllib
    from importlib.metadata import EntryPoint

    project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
    if project.get("name") == "croze":
        for name, value in project.get("entry-points", {}).get(group, {}).items():
            yield EntryPoint(name=name, value=value, group=group)


def _owner(point: EntryPoint) -> str:
    """The distribution that registers an entry point."""
    return point.dist.name if point.dist is not None else "croze"


def _members(protocol: type) -> list[str]:
    return sorted(n for n in {*vars(protocol), *inspect.get_annotations(protocol)} if not n.startswith("_"))


def _out_of_memory(error: Exception) -> bool:
    """torch has no class of its own for a CPU that has no memory left."""
    return (
        isinstance(error, MemoryError)
        or "OutOfMemory" in type(error).__name__
        or "can't allocate memory" in str(error)
    )


def _unusable(group: str, point: EntryPoint, why: str) -> PluginError:
    return PluginError(
        f"the plug-in {point.name!r} ({point.value}, package {_owner(point)}) {why}",
        where=KEYS[group],
        fix="mend or upgrade the package that registers it, or choose another",
    )
