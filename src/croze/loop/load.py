"""From a path to a Run: execute a task file, or take up the folder of a run."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
import traceback
import typing
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import msgspec

from croze import config
from croze.config import suggest
from croze.errors import ConfigError, CrozeError, DeclarationError, Interrupted, UsageError, told
from croze.loop.checkpoints import Checkpoints
from croze.loop.folder import read_config
from croze.run import TOP_KEYS, Run

_IMPORTED = "a task file is imported, not run as a program"
_CALL = re.compile(
    r"(?P<name>\w+)\.__init__\(\) (?:got an unexpected keyword argument '(?P<word>\w+)'|missing|takes)"
)
DEFAULT_NAME = next(field.default for field in dataclasses.fields(Run) if field.name == "name")


def load_run(path: str | Path) -> Run:
    """Execute a task file and give the one Run at its top level, named after the file where it has no name.

    The file runs as a module (``__name__`` is not "__main__") with its folder importable. Raises
    DeclarationError when it cannot run or declares no Run or several; errors of croze keep their kind.
    """
    file = _task_file(Path(path))
    module = _execute(file)
    found = {id(value): (name, value) for name, value in vars(module).items() if isinstance(value, Run)}
    if not found:
        raise DeclarationError("the file declares no Run", where=str(file), fix=_how_to_declare(file, module))
    if len(found) > 1:
        names = ", ".join(name for name, _ in found.values())
        raise DeclarationError(
            f"the file declares several Runs: {names}",
            where=str(file),
            fix="keep one of them, and give the others files of their own",
        )
    ((_, run),) = found.values()
    return dataclasses.replace(run, name=file.stem if run.name == DEFAULT_NAME else run.name, file=str(file))


def load_declared(folder: Path, run: Run | None = None) -> Run:
    """The Run of a run folder as it was declared, with the values it had. ``run``: one that was made in Python.

    Raises UsageError when the folder is no run, DeclarationError when its declaration cannot be had again.
    """
    config = read_config(folder)
    if run is None:
        if not config["file"]:
            raise DeclarationError(
                "the run was made in Python, so no task file is known",
                where=str(folder),
                fix="give the same Run: cz.resume(folder, run)",
            )
        run = load_run(config["file"])
    missing = sorted(run.keys().keys() - config["keys"].keys())
    if missing:
        raise DeclarationError(
            f"config.json does not say what {', '.join(missing[:3])} {'was' if len(missing) == 1 else 'were'}",
            where=str(folder),
            fix="put it back as the run wrote it; `croze keys` tells the defaults of a key that is new",
        )
    given = tuple(key for key, source in config.get("sources", {}).items() if source == "override")
    return dataclasses.replace(apply_keys(run, config["keys"]), dir=str(folder), overrides=given)


def load_trained(folder: Path) -> Run:
    """The Run of a run folder, its model the newest checkpoint's. Raises DeclarationError without one."""
    run = load_declared(folder)
    saved = Checkpoints(folder / "checkpoints").all()
    if not saved:
        raise DeclarationError(
            "the run has no checkpoint yet", where=str(folder), fix=f"croze eval {run.file}"
        )
    model = saved[-1] / "model"
    if (model / "adapter_config.json").exists():
        return dataclasses.replace(run, adapter=str(model), dir="")
    return dataclasses.replace(run, model=str(model), dir="")


def apply_keys(run: Run, keys: dict[str, Any]) -> Run:
    """A copy with the values that ``Run.keys`` gave, after a way through JSON. Raises ConfigError."""
    top: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        owner = Run if key in TOP_KEYS else config.SECTIONS.get(section)
        field = TOP_KEYS.get(key, name)
        hint = typing.get_type_hints(owner).get(field) if owner is not None else None
        if hint is None:
            raise ConfigError(f"unknown key {key!r}", where="config.json")
        try:
            plain = msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{key}: {error}", where="config.json") from None
        if owner is Run:
            top[field] = plain
        else:
            nested.setdefault("reward_options" if section == "reward" else section, {})[field] = plain
    sections = {name: dataclasses.replace(getattr(run, name), **values) for name, values in nested.items()}
    return dataclasses.replace(run, **top, **sections)


def find_run_folder(word: str) -> Path:
    """A run folder by its path, or by the beginning of its name under ``runs/``. Raises UsageError."""
    path = Path(word)
    if path.is_dir():
        return path
    if path.is_file():
        raise UsageError("this is a file; a run is a folder", where=word, fix="give runs/NAME-ID")
    names = [p.name for p in sorted(Path("runs").glob("*")) if p.is_dir()]
    named = [name for name in names if name == word] or [name for name in names if name.startswith(word)]
    if len(named) == 1:
        return Path("runs") / named[0]
    if named:
        raise UsageError(
            f"several runs are named so: {', '.join(named)}", where=word, fix="write more of the name"
        )
    raise UsageError(
        "there is no such run", where=word, fix=suggest(word, names) or "give the path of a run folder"
    )


def _task_file(path: Path) -> Path:
    if path.is_file() and path.suffix == ".py":
        return path.absolute()
    if path.is_dir():
        raise DeclarationError(
            "this is a folder, not a task file",
            where=str(path),
            fix="give the .py file that declares the run",
        )
    if path.is_file():
        raise DeclarationError("a task file is Python", where=str(path), fix="rename it to .py")
    near = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    fix = "name the task file first" if "=" in path.name else suggest(path.name, near)
    raise DeclarationError("there is no such task file", where=str(path), fix=fix)


def _execute(file: Path) -> ModuleType:
    name = "croze_task_" + re.sub(r"\W", "_", file.stem)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    words, sys.argv = sys.argv, [str(file)]  # as in the reward's process, which imports the file too
    try:
        exec(_compiled(file), vars(module))
    except KeyboardInterrupt as error:
        raise Interrupted(
            "stopped while the task file was running", where=_place(file, error), fix=_IMPORTED
        ) from None
    except OSError as error:
        if error.filename != str(file):
            raise _failed(file, error, module) from error
        raise DeclarationError(f"the file cannot be read: {error.strerror}", where=str(file)) from None
    except SyntaxError as error:
        if error.filename not in (None, str(file)):
            raise _failed(file, error, module) from error
        where = f"{file}:{error.lineno}" if error.lineno else str(file)
        raise DeclarationError(
            f"{type(error).__name__}: {error.msg}", where=where, fix=_caret(error)
        ) from None
    except CrozeError as error:
        where = f"{_place(file, error)} ({error.where})" if error.where else _place(file, error)
        raise type(error)(error.message, where=where, fix=error.fix) from error
    except BaseException as error:  # the user's code: whatever it raises is shown as theirs
        raise _failed(file, error, module) from error
    finally:
        sys.argv = words
    return module


def _compiled(file: Path) -> CodeType:
    """Raises SyntaxError for all that is no Python; early 3.11 has a ValueError for zero bytes."""
    try:
        return compile(file.read_bytes(), str(file), "exec")
    except ValueError as error:
        raise SyntaxError(str(error)) from None


def _failed(file: Path, error: BaseException, module: ModuleType) -> DeclarationError:
    return DeclarationError(told(error), where=_place(file, error), fix=_hint(file, error, module))


def _hint(file: Path, error: BaseException, module: ModuleType) -> str:
    """The next step after an error of the file's own code."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install what provides {error.name!r}, or put {error.name}.py beside the task file"
    if isinstance(error, SystemExit) or "sys.argv" in _line(file, error):
        return f"{_IMPORTED}, and gets no words of the command line"
    near = None
    if isinstance(error, NameError) and error.name:
        near = suggest(error.name, vars(module))
    elif isinstance(error, AttributeError) and error.name and isinstance(error.obj, ModuleType):
        near = suggest(error.name, dir(error.obj))
    elif isinstance(error, TypeError) and (call := _CALL.match(str(error))):
        near = _how_to_call(**call.groupdict())
    return near or f"`python {file}` shows all of it"


def _how_to_call(name: str, word: str | None) -> str | None:
    """What to write where Run, or an options class, was not given what it takes."""
    options = {cls.__name__: cls for cls in (Run, *config.SECTIONS.values())}
    if name not in options:
        return None
    if word is not None:
        fields = [field.name for field in dataclasses.fields(options[name])]
        return suggest(word, fields) or f"cz.{name} takes {', '.join(fields)}"
    return "name every argument: cz.Run(model=..., tasks=..., reward=...)" if name == "Run" else None


def _how_to_declare(file: Path, module: ModuleType) -> str:
    """Why a file that ran has no Run at its top level, if that can be seen."""
    if re.search(r"__name__\s*==\s*[\"']__main__[\"']", file.read_text("utf-8", "replace")):
        return f'move the Run out of `if __name__ == "__main__":`: {_IMPORTED}'
    for name, value in vars(module).items():
        inside = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        )
        if any(isinstance(entry, Run) for entry in inside) and not name.startswith("__"):
            return f"there is one inside {name}: give it a name of its own, run = {name}[...]"
    return "add run = cz.Run(model=..., tasks=..., reward=...), at the top level and not in a function"


def _place(file: Path, error: BaseException) -> str:
    """``FILE:LINE`` of the last line of the task file that the error passed through."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    return f"{file}:{lines[-1]}" if lines else str(file)


def _line(file: Path, error: BaseException) -> str:
    """The text of the line at ``_place``."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    return (frames[-1].line or "") if frames else ""


def _caret(error: SyntaxError) -> str:
    if error.text and "codec" not in error.msg:
        return f"look at: {error.text.strip()}"
    return "a task file is Python, saved as UTF-8 text"
