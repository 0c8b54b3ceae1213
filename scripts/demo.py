"""`make demo`: train the calculator example, say what was learned and what to look at next."""

from __future__ import annotations

import os
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does; read when torch is loaded

from croze.loop.load import load_run
from croze.loop.start import train

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "calc.py"
STEPS, EVAL_TASKS, MEAN_OF = 16, 32, 5


def main() -> None:
    run = load_run(EXAMPLE).override({"steps": str(STEPS), "loop.eval_tasks": str(EVAL_TASKS)})
    rewards: list[float] = []
    evals: list[dict] = []
    seconds = 0.0

    def show(event: dict) -> None:
        nonlocal seconds
        if event["event"] == "start":
            print(
                f"model   {event['model']}: {event['parameters'] / 1e6:.0f}M parameters ({event['source']})"
            )
            print(f"numbers {event['dtype']}; {event['numerics']}")
        elif event["event"] == "eval":
            evals.append(event)
            print(
                f"eval    {event['pass_at_1']:.2f} of {event['tasks']} held-out problems solved "
                f"[{event['low']:.2f}, {event['high']:.2f}]",
                flush=True,
            )
        elif event["event"] == "step":
            rewards.append(event["reward_mean"])
            seconds += event["step_s"]
            bar = "#" * round(40 * event["reward_mean"])
            print(
                f"step {event['step']:2d}  reward {event['reward_mean']:.3f} {bar:40s} "
                f"{event['step_s']:5.1f} s  sampler-trainer gap {event['max_logprob_gap'] or 0:g}",
                flush=True,
            )

    print(
        "A model of 135M parameters learns to answer with Python that a sandbox runs. First use fetches it."
    )
    began = time.monotonic()
    result = train(run, on_event=show)
    print(f"\nset-up and training took {time.monotonic() - began:.0f} s. What to look at next:")
    print(f"  croze trace {result.run_dir} --where 'step = {STEPS}'      what it says now")
    print(f"  croze trace {result.run_dir} g0.0.0 --tokens      a first attempt, token by token")
    print(f"  croze eval {result.run_dir} --tasks 64      pass@1 on other problems")
    print(f"  {result.model_dir}      loads in transformers")
    last = sum(rewards[-MEAN_OF:]) / len(rewards[-MEAN_OF:])
    before, after = evals[0]["pass_at_1"], evals[-1]["pass_at_1"]
    print(
        f"croze demo: reward {rewards[0]:.2f} -> {last:.2f}, eval {before:.2f} -> {after:.2f}, {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
