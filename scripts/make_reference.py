"""Write docs/reference/keys.md and docs/reference/verbs.md from the keys and parsers themselves.

python scripts/make_reference.py            write them
python scripts/make_reference.py --check    exit 1 where a page is not what it would write
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

from croze import config
from croze.cli.keys import describe_keys, spread, told
from croze.cli.words import Option, Place, Verb, describe

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
NOTE = "<!-- made by scripts/make_reference.py: change the docstrings, not this page -->"


def main(words: list[str]) -> int:
    pages = {"keys.md": keys_page(), "verbs.md": verbs_page()}
    stale = [name for name, text in pages.items() if read(REFERENCE / name) != text]
    if "--check" in words:
        for name in stale:
            print(f"docs/reference/{name} is not what it would be: python scripts/make_reference.py")
        return 1 if stale else 0
    for name in stale:
        (REFERENCE / name).write_text(pages[name], encoding="utf-8")
        print(f"wrote docs/reference/{name}")
    return 0


def read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def keys_page() -> str:
    """Every key, by section."""
    rows = describe_keys()
    sections: dict[str, list[dict[str, Any]]] = {"": []}
    for row in rows:
        section = row["key"].partition(".")[0]
        sections.setdefault(section if section in config.SECTIONS else "", []).append(row)
    parts = [
        "# Keys",
        NOTE,
        filled(
            "Every key can be given to `croze train`, `eval` and `check` as a `key=value` word, and is set in a task"
            " file as the field of the same name: `optim.lr=2e-5` is `cz.Run(optim=cz.Optim(lr=2e-5))`."
            " `croze keys WORD` shows the keys that contain a word. Where a run's values came from (default, file,"
            " override) is in its `config.json`."
        ),
    ]
    for section, found in sections.items():
        title = f"`{section}.*`" if section else "The run itself"
        said = (config.SECTIONS[section].__doc__ or "").strip() if section else ""
        parts += [f"## {title}", *([" ".join(said.split())] if said else []), keys_table(found)]
    return "\n\n".join(parts) + "\n"


def keys_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| key | default | takes | meaning |", "|---|---|---|---|"]
    for row in rows:
        default = "must be set" if row["default"] is None else f"`{told(row['default'])}`"
        takes = row["type"] + (f", {spread(*row['range'])}" if row["range"] else "")
        lines.append(f"| `{row['key']}` | {cell(default)} | {cell(takes)} | {cell(row['doc'])} |")
    return "\n".join(lines)


def verbs_page() -> str:
    """Every verb: what its help says."""
    verbs = describe().verbs
    index = ["| verb | |", "|---|---|", *(f"| [`{v.name}`](#{v.name}) | {cell(v.summary)} |" for v in verbs)]
    parts = [
        "# Verbs",
        NOTE,
        filled(
            "Every verb takes `--json`: one JSON object a line on stdout (`check`, `doctor` and `ps`: one list),"
            " everything else on stderr. An error is then one line with `event`, `kind`, `message`, `where` and `fix`."
            " Exit codes: 0 ok, 1 a check or an invariant failed, 2 wrong use or declaration, 3 the machinery"
            " failed, 4 interrupted and resumable."
        ),
        "\n".join(index),
    ]
    for verb in verbs:
        parts += [f"## {verb.name}", f"`{usage(verb)}`", f"```text\n{verb.text}\n```"]
        if rows := [place_row(p) for p in verb.places] + [
            option_row(o) for o in verb.options if not common(o)
        ]:
            parts.append("\n".join(["| | |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def usage(verb: Verb) -> str:
    places = []
    for place in verb.places:
        word = f"{place.name} ..." if place.many else place.name
        places.append(word if place.needed else f"[{word}]")
    return " ".join([f"croze {verb.name}", *places])


def common(option: Option) -> bool:
    return "--help" in option.flags or "--json" in option.flags


def place_row(place: Place) -> str:
    return f"| `{cell(place.name)}` | {cell(place.help)}{choices(place)} |"


def option_row(option: Option) -> str:
    takes = f" {option.takes.name}" if option.takes else ""
    flags = ", ".join(f"`{flag}{takes}`" for flag in option.flags)
    return f"| {cell(flags)} | {cell(option.help)}{choices(option.takes)} |"


def choices(place: Place | None) -> str:
    return ": " + ", ".join(f"`{choice}`" for choice in place.choices) if place and place.closed else ""


def cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|").replace("\n", " ")


def filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
