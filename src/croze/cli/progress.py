"""A run as it goes: JSON records, one ``key=value`` line a step, or a live table on a terminal."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from croze.cli.output import Output, number

if TYPE_CHECKING:
    from rich.console import RenderableType

Show = Callable[[dict[str, Any]], None]
STEPS_SHOWN = 10
ID_SHOWN = 12


@contextmanager
def progress(output: Output, *, quiet: bool) -> Iterator[Show]:
    """How events are shown: a function to call with each. ``quiet`` leaves only the end."""
    if output.json:
        yield lambda event: None if quiet and event["event"] != "done" else output.record(event)
    elif quiet or not output.live:
        yield Lines(output, quiet=quiet)
    else:
        with Table() as table:
            yield table


class Lines:
    """One line of ``key=value`` words an event."""

    def __init__(self, output: Output, *, quiet: bool) -> None:
        self._output = output
        self._quiet = quiet

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "start" and not self._quiet:
            print(_opening(event), file=sys.stderr, flush=True)
        elif event["event"] == "done":
            self._output.text(_closing(event))
        elif not self._quiet:
            self._output.text(told(event))


class Table:
    """The last steps in a table redrawn in place, how far the run is, and where a step's time goes."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False)
        self._steps: deque[dict[str, Any]] = deque(maxlen=STEPS_SHOWN)
        self._total: int | None = None

    def __enter__(self) -> Table:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "start":
            self._total = event.get("steps")
            self._console.print(_opening(event), markup=False, highlight=False)
        elif event["event"] == "step":
            self._steps.append(event)
            self._live.update(self.render(), refresh=True)
        elif event["event"] == "done":
            self._console.print(_closing(event), markup=False, highlight=False)
        else:
            if event["event"] == "error":
                self._live.stop()  # it may be the last that this process does: the cursor is to be seen again
            self._console.print(told(event), markup=False, highlight=False)

    def render(self) -> RenderableType:
        """The table of the last steps."""
        from rich.table import Table as Grid

        last = self._steps[-1]
        title = f"step {last['step']}" + (f" of {self._total}" if self._total else "")
        if self._total:
            mean = sum(step["step_s"] for step in self._steps) / len(self._steps)
            title += f", {_duration(mean * (self._total - last['step']))} to go"
        grid = Grid(title=title, title_justify="left", caption=_shares(last), caption_justify="left")
        names = (
            "step",
            "reward_mean",
            "reward_std",
            "kl_rollout",
            "max_logprob_gap",
            "tokens_per_cpu_s",
            "step_s",
            "valid",
            "infra_faults",
        )
        for name in names:
            grid.add_column(name.replace("_", " "), justify="right")
        for step in self._steps:
            grid.add_row(*(number(step.get(name)) for name in names))
        return grid


def told(event: Mapping[str, Any]) -> str:
    """An event as a person reads it: a warning as an error is, all else as ``words``."""
    if event["event"] != "warning":
        return " ".join(words(event))
    kind = f"[{event['kind']}]" if "kind" in event else ""
    lines = [f"warning{kind}: {event['message']}"]
    lines += [
        f"  {name} {event[key]}" for key, name in (("where", "where:"), ("fix", "do:   ")) if key in event
    ]
    return "\n".join(lines)


def words(event: Mapping[str, Any]) -> list[str]:
    """An event as ``key=value`` words; a step needs no name, the parts of a mapping are flattened."""
    said = [] if event["event"] == "step" else [str(event["event"])]
    for key, value in event.items():
        if key == "event":
            continue
        if isinstance(value, Mapping):
            stem, _, unit = key.rpartition("_")
            said += [f"{part}_{unit if stem else key}={number(v)}" for part, v in value.items()]
        elif isinstance(value, str) and key.endswith("_id"):
            said.append(f"{key}={value[:ID_SHOWN]}")
        else:
            said.append(f"{key}={number(value)}")
    return said


def _opening(event: Mapping[str, Any]) -> str:
    told = f"run {event['run_dir']}   rollouts: croze trace {event['run_dir']}"
    if not event.get("exact", True):
        told += f"\nlog-probs of engine and trainer: {event['numerics']}"
    return told


def _closing(event: Mapping[str, Any]) -> str:
    return " ".join(words(event))


def _shares(step: Mapping[str, Any]) -> str:
    phases = step.get("phase_s") or {}
    whole = sum(phases.values()) or 1.0
    return "  ".join(f"{name} {100 * seconds / whole:.0f}%" for name, seconds in phases.items())


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
