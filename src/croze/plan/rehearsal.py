"""A rehearsal: two steps of the real loop, with the run's tasks, reward and sandbox, and a tiny model of its family.

It is a process of its own (``croze train``), in a folder that is removed afterwards, under a deadline. The tiny model
has random weights and the run's own tokenizer: its replies are nonsense, and what is rehearsed is everything else.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from croze.errors import DeclarationError
from croze.models.architecture import read_architecture
from croze.models.protocol import ModelFiles
from croze.plan.checks import Context, Report
from croze.run import Run
from croze.trace.metrics import read_jsonl

DEADLINE_S = 60.0
STEPS = 2
GROUPS, GROUP_SIZE, MAX_TOKENS, EVAL_TASKS = 2, 4, 32, 2
"""No more of these than the run declares."""
TINY = 5_000_000
"""Parameters up to which the run's own model is rehearsed with."""
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def look_at_rehearsal(context: Context, report: Report) -> None:
    """Two steps: how long they took, which faults they met, whether rewards differed."""
    run, files = context.run, context.files
    assert files is not None and context.arch is not None
    if not run.file:
        raise DeclarationError(
            "a run made in Python cannot be rehearsed: another process would have to find it",
            where="rehearse",
            fix="write the Run at the top level of a file: croze check FILE --rehearse",
        )
    with tempfile.TemporaryDirectory(prefix="croze-rehearsal-") as scratch:
        folder = Path(scratch)
        model = files.path if context.arch.parameters <= TINY else make_tiny(files, folder / "model")
        began = time.monotonic()
        events, said, ended = _train(run, words(run, model, folder / "run"))
        _report(events, said, ended, time.monotonic() - began, report)
        _report_faults(folder / "run", report)


def words(run: Run, model: Path, folder: Path) -> list[str]:
    """``key=value`` words: the run's own overrides, then what makes it small."""
    keys = run.keys()
    groups = min(GROUPS, run.groups_per_step)
    given: dict[str, Any] = {key: keys[key] for key in run.overrides}
    given |= {
        "model": str(model),
        "run.dir": str(folder),
        "steps": STEPS,
        "groups_per_step": groups,
        "group_size": min(GROUP_SIZE, run.group_size),
        "sampling.max_tokens": min(MAX_TOKENS, run.sampling.max_tokens),
        "optim.minibatches": min(groups, run.optim.minibatches),
        "optim.warmup_steps": 0,
        "loop.eval_every": 0,
        "loop.eval_tasks": min(EVAL_TASKS, run.loop.eval_tasks),
        "algo.skip_zero_advantage": False,  # equal rewards, which nonsense gets, shall still be trained on
    }
    return [f"{key}={_written(value)}" for key, value in given.items()]


def make_tiny(files: ModelFiles, folder: Path) -> Path:
    """A model directory of the same family and vocabulary with SIZES, random weights, and the same tokenizer."""
    import torch
    from safetensors.torch import save_file

    from croze.models.layout import Layout

    folder.mkdir()
    for path in files.path.iterdir():
        weights = path.suffix == ".safetensors" or path.name.endswith(".index.json")
        if (
            path.is_file()
            and not weights
            and path.suffix in (".json", ".jinja", ".txt", ".model", ".tiktoken")
        ):
            shutil.copyfile(path, folder / path.name)
    config = (
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
        | SIZES
        | {"tie_word_embeddings": True}
    )
    if isinstance(kinds := config.get("layer_types"), list):
        config["layer_types"] = kinds[: SIZES["num_hidden_layers"]]
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    scale = SIZES["hidden_size"] ** -0.5
    tensors = {
        name: torch.randn(slot.shape, generator=generator) * scale
        if len(slot.shape) == 2
        else torch.ones(slot.shape)
        for name, slot in Layout(read_architecture(folder)).slots.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _train(run: Run, overrides: list[str]) -> tuple[list[dict[str, Any]], str, int | None]:
    """The events of ``croze train``, what it said on stderr, its exit code (None: it met the deadline)."""
    home = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([home, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    process = subprocess.Popen(
        [sys.executable, "-m", "croze", "train", run.file, *overrides, "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    ended: int | None = None
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
        ended = process.returncode
    except subprocess.TimeoutExpired:
        _end(process)
        out, err = process.communicate()
    finally:
        _end(process)
    return _events(out), err.decode("utf-8", "replace"), ended


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it if it is still there; its own children die with it."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _events(out: bytes) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in out.split(b"\n")[:-1] if line.startswith(b"{")]


def _report(
    events: list[dict[str, Any]], said: str, ended: int | None, took_s: float, report: Report
) -> None:
    steps = [event for event in events if event.get("event") == "step"]
    errors = [event for event in events if event.get("event") == "error"]
    done = any(event.get("event") == "done" for event in events)
    if errors:
        error = errors[-1]
        report.fail(
            error["kind"],
            f"the rehearsal ended: {error['message']}",
            where=error["where"] or "rehearsal",
            fix=error["fix"],
        )
    elif ended is None:
        report.fail(
            "wait",
            f"the rehearsal did not end within {DEADLINE_S:g} s; it had done {len(steps)} of {STEPS} steps",
            where="rehearsal",
            fix="see which phase takes so long: croze train with steps=1",
        )
    elif not done:
        last = said.strip().splitlines()[-1:] or ["nothing"]
        report.fail(
            "rehearsal",
            f"the rehearsal ended with code {ended}; it last said: {last[0]:.300}",
            where="rehearsal",
        )
    else:
        times = ", ".join(f"{event['step_s']:.2f}" for event in steps)
        means = ", ".join(_number(event["reward_mean"]) for event in steps)
        spreads = ", ".join(_number(event["reward_std"]) for event in steps)
        report.ok(
            f"{len(steps)} steps of {times} s with a tiny model, {took_s:.0f} s in all; of its nonsense the reward"
            f" made {means} on average, {spreads} apart"
        )


def _report_faults(folder: Path, report: Report) -> None:
    """Attempts that met a fault; where the loop ended over them it has said so."""
    told = Counter(row["message"] for row in read_jsonl(folder / "faults.jsonl") if "rollout_id" in row)
    if told and report.status == "ok":
        message, times = told.most_common(1)[0]
        report.warn(
            "rehearsal.faults",
            f"{sum(told.values())} attempts met a fault, {times} of them: {message:.300}",
            where="rehearsal",
            fix="a fault is never a reward: the attempt is made again, then left out",
        )


def _number(value: Any) -> str:
    return "none" if value is None else f"{value:.3g}"


def _written(value: Any) -> str:
    """A value as a word of the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
