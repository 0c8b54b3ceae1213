"""Every word that croze's command line takes, read off the parsers and options themselves: nothing here goes stale."""

from __future__ import annotations

import argparse
import typing
from typing import Any, Literal

import msgspec

from croze import config, plugins
from croze.cli.keys import describe_keys
from croze.cli.main import VERBS, Parser, parser_of
from croze.models.builtin import BUILTINS
from croze.run import TOP_KEYS, Run

Kind = Literal["file", "run", "file or run", "key", "section", "folder", "choice", "none"]
"""What a place in a command is filled with."""

_KINDS: dict[str, Kind] = {
    "FILE": "file",
    "RUN": "run",
    "FILE|RUN": "file or run",
    "DIR": "folder",
    "WORD": "section",
    "key=value": "key",
    "MODEL": "choice",
}
_CHOICES = {"MODEL": tuple(BUILTINS)}
"""By metavar; one that is not here takes a word nobody can foresee."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A positional argument, or what an option takes. ``many``: any number of them; ``closed``: nothing else than
    ``choices`` will do."""

    name: str
    kind: Kind
    help: str = ""
    choices: tuple[str, ...] = ()
    closed: bool = False
    many: bool = False
    needed: bool = True


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """``flags``: its spellings, short ones first; ``takes`` None for a switch."""

    flags: tuple[str, ...]
    help: str = ""
    takes: Place | None = None


class Verb(msgspec.Struct, frozen=True, kw_only=True):
    """A verb. ``text``: all that its help says above the arguments."""

    name: str
    summary: str
    text: str
    places: tuple[Place, ...]
    options: tuple[Option, ...]


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key of ``key=value``. ``takes``: its values as far as they can be foreseen."""

    name: str
    doc: str
    takes: Place


class Words(msgspec.Struct, frozen=True, kw_only=True):
    verbs: tuple[Verb, ...]
    keys: tuple[Key, ...]

    @property
    def sections(self) -> tuple[str, ...]:
        return tuple(config.SECTIONS)


def describe() -> Words:
    """All of it. Loads every verb's module."""
    return Words(
        verbs=tuple(_verb(name, summary) for name, summary in VERBS.items()),
        keys=tuple(_key(row) for row in describe_keys()),
    )


def _verb(name: str, summary: str) -> Verb:
    module, parser = parser_of(name)
    actions = [a for a in _actions(parser) if a.help is not argparse.SUPPRESS]
    return Verb(
        name=name,
        summary=summary,
        text=(module.__doc__ or "").strip(),
        places=tuple(_place(a) for a in actions if not a.option_strings),
        options=tuple(_option(a) for a in actions if a.option_strings),
    )


def _actions(parser: Parser) -> list[argparse.Action]:
    return list(parser._actions)  # argparse has no public list of them


def _place(action: argparse.Action) -> Place:
    name = str(action.metavar or action.dest.upper())
    choices = tuple(map(str, action.choices or _CHOICES.get(name, ())))
    return Place(
        name=name,
        kind="choice" if choices else _KINDS.get(name, "none"),
        help=_help(action),
        choices=choices,
        closed=action.choices is not None,
        many=action.nargs in ("*", "+"),
        needed=action.nargs not in ("*", "?"),
    )


def _option(action: argparse.Action) -> Option:
    takes = None if action.nargs == 0 else _place(action)
    return Option(flags=tuple(sorted(action.option_strings, key=len)), help=_help(action), takes=takes)


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%")


def _key(row: dict[str, Any]) -> Key:
    name, values = row["key"], _values(row["key"])
    kind: Kind = "choice" if values else "folder" if name == "run.dir" else "none"
    return Key(name=name, doc=row["doc"], takes=Place(name=name, kind=kind, choices=values))


def _values(key: str) -> tuple[str, ...]:
    """What a key takes, as far as it can be foreseen: words of its type, plug-ins that are installed, models."""
    groups = {key: group for group, key in plugins.KEYS.items()}
    if key in groups:
        auto = () if key == "algo.name" else (plugins.AUTO,)
        return (*auto, *plugins.names(groups[key]))
    if key == "model":
        return tuple(BUILTINS)
    annotation = _annotation(key)
    if annotation is bool:
        return ("true", "false")
    return tuple(map(str, typing.get_args(annotation))) if typing.get_origin(annotation) is Literal else ()


def _annotation(key: str) -> Any:
    if key in TOP_KEYS:
        return typing.get_type_hints(Run)[TOP_KEYS[key]]
    section, _, name = key.partition(".")
    return typing.get_type_hints(config.SECTIONS[section])[name]
