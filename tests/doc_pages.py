"""The pages of the documentation, taken apart: blocks, commands, and commands made small enough for a test."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SMALL = {
    "steps": "2",
    "groups_per_step": "2",
    "group_size": "4",
    "engine.threads": "1",
    "engine.self_check": "false",
    "loop.eval_tasks": "2",
    "sampling.max_tokens": "12",
}
_BLOCK = re.compile(r"(?:<!-- (\S+) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block. ``quoted``: the file of the repository that it shows a part of."""

    language: str
    text: str
    quoted: str | None


def blocks(page: Path) -> list[Block]:
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [Block(language, text, quoted or None) for quoted, language, text in found]


def commands(page: Path) -> Iterator[list[str]]:
    """The words after ``croze`` of every command that a page shows, without what is explained beside it."""
    for block in blocks(page):
        if block.language in ("", "sh", "text"):
            for line in block.text.splitlines():
                said = re.match(r"(?:\$ )?croze ((?:'[^']*'|\"[^\"]*\"|(?! [ #>])[^#])+)", line)
                if said and not said[1].startswith("demo:"):
                    yield shlex.split(said[1].rstrip())


def shrunk(words: list[str], model: Path) -> list[str]:
    """A command that does the same in a few steps: few rollouts, and ``model`` in place of one of 135M parameters."""
    verb, *rest = words
    if verb == "eval":
        return [
            verb,
            *rest[:1],
            "--tasks",
            "2",
            "--samples",
            "2",
            f"engine.threads={SMALL['engine.threads']}",
        ]
    if verb not in ("train", "check"):
        return words
    given = dict(word.split("=", 1) for word in rest[1:])
    small = given | SMALL
    task = Path(rest[0])
    if task.is_file() and "smollm2" in task.read_text():
        small["model"] = str(model)
    return [verb, rest[0], *(f"{key}={value}" for key, value in small.items())]


def told_names(text: str) -> set[str]:
    """The names of ``name=value`` figures, and the titles of tables. Not of a resume: in a test the run has ended."""
    text = re.sub(r"^resume .*$", "", text, flags=re.MULTILINE)
    titles = re.findall(r"^(?:rollout|position|stave|run) .*$", text, re.MULTILINE)
    return set(re.findall(r"\b([a-z_]\w*)=", text)) | {
        " ".join(line.split()) for line in titles if "  " in line
    }
