"""List and show the rollouts of a run, while it goes or after it ended.

croze trace runs/calc-7f3a                            the first rollouts
croze trace calc-7f3a --where "score < 0.5 AND step > 10"
croze trace calc-7f3a g12.3.0 --tokens                one rollout, token by token
croze trace calc-7f3a --sql "SELECT stave, sum(t_end - t_start) FROM spans GROUP BY stave"
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from croze.cli.output import Output, aligned, excerpt, number, printable
from croze.config import suggest
from croze.errors import UsageError
from croze.loop.load import find_run_folder
from croze.trace.reader import TraceReader

LISTED = 20
_LIST = ("rollout_id", "step", "task_id", "score", "fault", "finish", "generated_tokens", "reply")
_TITLES = ("rollout", "step", "task", "score", "fault", "finish", "tokens", "reply")
_TOKEN = ("position", "token_id", "logprob", "mask", "producer", "weights_id", "text")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="a run folder, or its name under runs/")
    parser.add_argument(
        "rollout", nargs="?", metavar="ROLLOUT_ID", help="show this rollout (or list this group)"
    )
    parser.add_argument("--where", metavar="SQL", help="a condition on the columns of rollouts")
    parser.add_argument("--tokens", action="store_true", help="every token of the rollout")
    parser.add_argument(
        "--limit", type=int, metavar="N", help=f"at most N rows; 0: all (default {LISTED}; --json: all)"
    )
    parser.add_argument("--sql", metavar="QUERY", help="any query over spans, rollouts and tokens")


def run(arguments: argparse.Namespace, output: Output) -> None:
    _check(arguments)
    limit = arguments.limit if arguments.limit is not None else 0 if output.json else LISTED
    folder = find_run_folder(arguments.folder)
    with TraceReader(folder) as reader:
        if arguments.sql:
            _table(reader.query(arguments.sql), limit, output)
        elif arguments.rollout is None:
            _list(reader, arguments.where, limit, output)
        else:
            _one(reader, folder, arguments, limit, output)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.tokens and arguments.rollout is None:
        raise UsageError(
            "--tokens wants a rollout", where="croze trace", fix="croze trace RUN ROLLOUT_ID --tokens"
        )
    if sum(x is not None for x in (arguments.rollout, arguments.where, arguments.sql)) > 1:
        raise UsageError(
            "a rollout, --where and --sql exclude each other", where="croze trace", fix="keep one"
        )
    if (arguments.limit or 0) < 0:
        raise UsageError("--limit cannot be negative", where="croze trace")


def _one(
    reader: TraceReader, folder: Path, arguments: argparse.Namespace, limit: int, output: Output
) -> None:
    name, tokens = arguments.rollout, arguments.tokens
    quoted = name.replace("'", "''")
    found = reader.rollouts(f"rollout_id = '{quoted}'")
    if not found:
        if reader.count(f"group_id = '{quoted}'") and not tokens:
            _list(reader, f"group_id = '{quoted}'", limit, output)
            return
        names = [row["rollout_id"] for row in reader.query("SELECT rollout_id FROM rollouts")]
        raise UsageError(f"no rollout {name!r} in this trace", where="croze trace", fix=suggest(name, names))
    if tokens:
        _tokens(_spelled(reader.tokens(name), folder), output)
    elif output.json:
        output.record(_plain(found[0]))
    else:
        output.text(_shown(found[0]))


def _list(reader: TraceReader, where: str | None, limit: int, output: Output) -> None:
    rows = reader.rollouts(where, limit)
    if output.json:
        for row in rows:
            output.record(_plain(row))
        return
    lines = [
        [*(printable(number(row[c])) for c in _LIST[:-1]), excerpt(row["reply"] or "", 60)] for row in rows
    ]
    output.text(aligned([_TITLES, *lines]))
    total = reader.count(where)
    if total > len(rows):
        output.text(f"{len(rows)} of {total} rollouts (--limit 0 shows all)")


def _tokens(rows: list[dict[str, Any]], output: Output) -> None:
    if output.json:
        for row in rows:
            output.record(row)
    elif not rows:
        raise UsageError(
            "the run kept no tokens of this rollout", where="croze trace", fix="train with trace.tokens=true"
        )
    else:
        cells = [
            [*(number(row[c]) for c in _TOKEN[:-1]), repr(row["text"])[1:-1] if row["text"] else ""]
            for row in rows
        ]
        output.text(aligned([_TOKEN, *cells]))


def _spelled(rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Tokens with their text: as recorded, else by the run's tokenizer while its model is still there."""
    if not rows or any(row["text"] is not None for row in rows):
        return rows
    from croze.models.protocol import ModelFiles
    from croze.models.tokenizer import load_tokenizer

    try:
        model = msgspec.json.decode((folder / "config.json").read_bytes())["model"]
    except (OSError, msgspec.DecodeError, KeyError):
        return rows
    files = ModelFiles(name=model["name"], path=Path(model["path"]), source=model["source"])
    if not files.path.is_dir():
        return rows
    tokenizer = load_tokenizer(files)
    return [row | {"text": tokenizer.decode([row["token_id"]], special=True)} for row in rows]


def _table(rows: list[dict[str, Any]], limit: int, output: Output) -> None:
    shown = rows[:limit] if limit else rows
    if output.json:
        for row in shown:
            output.record(row)
    elif rows:
        cells = [[excerpt(number(value), 60) for value in row.values()] for row in shown]
        output.text(aligned([list(rows[0]), *cells]))
        if len(rows) > len(shown):
            output.text(f"{len(shown)} of {len(rows)} rows (--limit 0 shows all)")


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its JSON columns as data."""
    return row | {"parts": _parts(row), "prompt": _prompt(row)}


def _parts(row: dict[str, Any]) -> dict[str, float]:
    return msgspec.json.decode(row["parts"]) if row["parts"] else {}


def _prompt(row: dict[str, Any]) -> Any:
    # A text prompt may itself look like JSON; only chat messages are told by their roles.
    try:
        messages = msgspec.json.decode(row["prompt"], type=list[dict[str, Any]])
    except msgspec.DecodeError:
        return row["prompt"]
    return messages if messages and all("role" in m for m in messages) else row["prompt"]


def _shown(row: dict[str, Any]) -> str:
    apart = ("prompt", "reply", "parts", "turn_parts", "t_start", "t_end")
    facts = {name: number(value) for name, value in row.items() if name not in apart}
    if row["t_start"] is not None and row["t_end"] is not None:
        began = datetime.fromtimestamp(row["t_start"], UTC).isoformat(" ", "milliseconds")
        facts["time"] = f"{began}, {number(row['t_end'] - row['t_start'])} s"
    facts |= {f"part {name}": number(value) for name, value in _parts(row).items()}
    for turn, parts in enumerate(row["turn_parts"] or [], 1):
        facts |= {f"turn {turn} {name}": number(value) for name, value in parts.items()}
    said = [f"{printable(name):<17} {printable(fact)}" for name, fact in facts.items()]
    prompt = _prompt(row)
    messages = [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt
    for message in messages:
        content = message.get("content")
        text = content if isinstance(content, str) else msgspec.json.encode(message).decode()
        said += ["", f"[{printable(str(message['role']))}]", printable(text, lines=True)]
    return "\n".join([*said, "", "[reply]", printable(row["reply"] or "", lines=True)])
