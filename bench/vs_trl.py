"""croze against TRL's GRPOTrainer: CPU seconds and peak memory of one RL step, same model, task and policy.

Both sides train smollm2-135m-instruct on the tasks of examples/calc.py in the same order, 4 prompts x 8
siblings, 12 new tokens, temperature 1. The learning rate is so small that the policy stays the early one, so
that both see the same share of groups without reward variance (which croze may skip and TRL computes); the
shares are printed, and with --all a row without skipping compares equal work outright. croze judges in its
sandbox, as the example does; TRL's reward parses the expression in process, and so does croze's row "parsed".
The first step is warm-up. Sides take turns.
"""

from __future__ import annotations

import itertools
import json
import runpy
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
from harness import Measured, Venv

TRL = Venv(
    name="trl",
    requirements=(
        "torch==2.13.0",
        "trl==1.16.0",
        "transformers==5.24.0",
        "accelerate==1.15.0",
        "datasets==5.2.0",
    ),
)
EXAMPLE = harness.ROOT / "examples" / "calc.py"
PARSED = harness.PEERS / "calc_in_process.py"
PROMPTS, SIBLINGS, NEW_TOKENS = 4, 8, 12
STILL = "1e-9"
COLUMNS = ("side", "cpu_s/step", "peak_mib", "zero_var", "reward")
RATIO_COLUMNS = ("side", "against", "cpu_ratio", "memory_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side's steps after the first: median CPU and wall seconds, the tree's peak memory, the mean share
    of groups without reward variance, the mean reward, and what ran."""

    side: str
    cpu_s: float
    wall_s: float
    peak_mib: float
    zero_variance: float | None
    reward: float
    how: Mapping[str, Any]


def summary(name: str, measured: Measured, how: Mapping[str, Any], zero_variance: float | None) -> Side:
    """The side's figures from its step lines; CPU time is what the tree used between two of them."""
    steps = measured.events("step")
    pairs = list(itertools.pairwise(steps))
    if not pairs:
        raise harness.BenchError(f"{name} printed {len(steps)} step lines; at least 2 are needed")
    return Side(
        side=name,
        cpu_s=statistics.median(after.cpu_s - before.cpu_s for before, after in pairs),
        wall_s=statistics.median(after.wall_s - before.wall_s for before, after in pairs),
        peak_mib=measured.peak_rss_mib,
        zero_variance=zero_variance,
        reward=statistics.fmean(line.record["reward_mean"] for line in steps),
        how={**how, "cpu_s_each": [round(after.cpu_s - before.cpu_s, 3) for before, after in pairs]},
    )


def trl_side(model: Path, dtype: str, steps: int, microbatch: int, checkpointing: bool) -> Side:
    """TRL in its own environment; ``microbatch`` completions in one forward, 32 generated at once."""
    python = TRL.python()
    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder) / "tasks.jsonl"
        rows = itertools.islice(problems(), PROMPTS * (steps + 1))
        tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
        argv = [python, harness.PEERS / "trl_grpo.py", "--model", model, "--tasks", tasks, "--out", folder]
        argv += ["--dtype", dtype, "--steps", str(steps), "--microbatch", str(microbatch), "--lr", STILL]
        measured = harness.run([*argv, *(["--checkpointing"] if checkpointing else [])])
    lines = measured.events("step")
    name = f"TRL {dtype}, {microbatch} a forward" + (", checkpointing" if checkpointing else "")
    how = {**measured.last("ready"), "dtype": dtype, "microbatch": microbatch, "checkpointing": checkpointing}
    share = statistics.fmean(line.record["zero_variance"] for line in lines)
    return summary(name, measured, how, share)


def problems() -> Iterator[dict[str, Any]]:
    """The example's rows in the order in which croze trains on them."""
    from croze.env.tasks import as_tasks

    tasks = as_tasks(runpy.run_path(str(EXAMPLE))["run"].tasks)
    return ({"prompt": task.prompt, **task.columns} for task in tasks.stream(0))


def croze_side(share_prompt: bool, steps: int = 6, skip: bool = True, parsed: bool = False) -> Side:
    """``croze train`` on the example, as a user would run it, with one thread and ``engine.dtype=auto``.

    ``share_prompt``: a group's prompt is computed once in training. ``skip``: groups that cannot move the
    loss are left out of the computation. ``parsed``: the reward is the one of TRL's side, without a sandbox.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = {
            "steps": steps,
            "seed": 0,
            "run.dir": Path(folder) / "run",
            "groups_per_step": PROMPTS,
            "group_size": SIBLINGS,
            "sampling.max_tokens": NEW_TOKENS,
            "sampling.temperature": 1.0,
            "optim.lr": STILL,
            "optim.share_prompt": str(share_prompt).lower(),
            "algo.skip_zero_advantage": str(skip).lower(),
            "engine.threads": 1,
            "loop.eval_tasks": 0,
        }
        argv = [Path(sys.executable).with_name("croze"), "train", PARSED if parsed else EXAMPLE, "--json"]
        measured = harness.run([*argv, *(f"{key}={value}" for key, value in words.items())])
        share = zero_variance_share(Path(folder) / "run")
    name = f"croze, prompt {'shared' if share_prompt else 'not shared'}"
    name += (", parsed" if parsed else "") + ("" if skip else ", no skipping")
    how = {**words, "run.dir": "", **harness.versions("croze", "torch")}
    return summary(name, measured, how, share)


def zero_variance_share(run_dir: Path) -> float | None:
    """The share of groups whose valid rollouts all have one reward, from the run's own trace."""
    from croze.trace.reader import TraceReader

    groups = "SELECT count(DISTINCT score) AS scores FROM rollouts WHERE valid AND step > 0 GROUP BY group_id"
    with TraceReader(run_dir) as trace:
        return trace.query(f"SELECT avg(CAST(scores < 2 AS DOUBLE)) AS share FROM ({groups})")[0]["share"]


def table(sides: Sequence[Side]) -> list[dict[str, Any]]:
    return [
        {
            "side": side.side,
            "cpu_s/step": side.cpu_s,
            "peak_mib": side.peak_mib,
            "zero_var": side.zero_variance,
            "reward": side.reward,
        }
        for side in sides
    ]


def ratios(ours: Sequence[Side], peers: Sequence[Side]) -> list[dict[str, Any]]:
    """Each of our rows over each of the peer's."""
    return [
        {
            "side": our.side,
            "against": peer.side,
            "cpu_ratio": our.cpu_s / peer.cpu_s,
            "memory_ratio": our.peak_mib / peer.peak_mib,
        }
        for our in ours
        for peer in peers
    ]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=6, help="steps a side, the first of them warm-up")
    parser.add_argument(
        "--all", action="store_true", help="TRL's other dtype and checkpointing, croze without skipping"
    )
    args = parser.parse_args()
    started, model = harness.machine(), harness.smollm2()
    best, other = ("bf16", "fp32") if started.native_bf16 else ("fp32", "bf16")
    steps = args.steps
    peers, ours = [trl_side(model, best, steps, 32, False)], [croze_side(True, steps)]
    peers.append(trl_side(model, best, steps, 8, False))
    ours += [croze_side(True, steps, parsed=True), croze_side(False, steps)]
    if args.all:
        peers.append(trl_side(model, other, steps, 32, False))
        ours += [croze_side(True, steps, skip=False), croze_side(False, steps, skip=False)]
        peers.append(trl_side(model, best, steps, 8, True))
    compared = ratios(ours, peers)
    harness.report("vs_trl", started, COLUMNS, table([*peers, *ours]))
    harness.table(RATIO_COLUMNS, compared)
    results = {"sides": [asdict(side) for side in [*peers, *ours]], "ratios": compared}
    harness.save(args.json, "vs_trl", started, results)


if __name__ == "__main__":
    main()
