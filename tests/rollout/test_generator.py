"""Rollouts of a group from a real engine."""

import asyncio

import numpy as np
import pytest
from test_session import Words

import small_models as small
from croze.clock import RealClock
from croze.config import EngineOptions, Sampling
from croze.errors import TasksError
from croze.inference.core import EngineCore
from croze.inference.torch_engine import TorchEngine
from croze.models.device import ComputeThread
from croze.rollout.groups import Attempt, Generator
from croze.types import Rollout, Task

PROMPT = "w5 w6 w7"


def attempts(count: int) -> list[Attempt]:
    return [Attempt(f"g.{i}", "g", i, 1, 70 + i) for i in range(count)]


def roll_out(count: int, prompt: str = PROMPT, **sampling: object) -> tuple[list[Rollout], small.Rig]:
    rig = small.make_rig(small.architecture(vocab=100, layers=1, context=64), measured=False)

    async def scenario() -> list[Rollout]:
        thread = ComputeThread(1)
        engine = TorchEngine(EngineCore(rig.weights, EngineOptions(), Words()), thread)
        try:
            await engine.prepare(rig.weights.weights_id, ())
            await engine.commit(rig.weights.weights_id)
            generator = Generator(
                engine,
                Words(),
                Sampling(**sampling),  # type: ignore[arg-type]
                seed=3,
                context=64,
                clock=RealClock(),
            )
            task = Task(id="t", prompt=prompt)
            async with asyncio.timeout(20):
                return [r async for r in generator.run(task, attempts(count), step=4)]
        finally:
            await engine.close()
            thread.close()

    return asyncio.run(scenario()), rig


def test_a_group_of_rollouts():
    rollouts, rig = roll_out(4, max_tokens=12)
    assert sorted(r.member for r in rollouts) == [0, 1, 2, 3]
    for r in rollouts:
        assert (r.id, r.group_id, r.attempt, r.step) == (f"g.{r.member}", "g", 1, 4)
        assert r.ids_T[:3].tolist() == [5, 6, 7]
        assert r.finish == ("stop" if r.ids_T[-1] == 0 else "length")
        assert r.reply == Words().decode(r.ids_T[3:])
        assert [w.weights_id for w in r.weights] == ["w0"]
        assert 0 < r.t_start <= r.t_end
        found = rig.engine().score(r.ids_T[:3], r.ids_T[3:], 1.0)
        np.testing.assert_allclose(r.logprobs_T[3:], found, atol=1e-5)
    again, _ = roll_out(4, max_tokens=12)
    assert {r.id: r.ids_T.tolist() for r in again} == {r.id: r.ids_T.tolist() for r in rollouts}


def test_stop_strings_end_a_reply_and_are_cut_from_its_text():
    whole, _ = roll_out(1, max_tokens=12)
    stop = f"w{whole[0].ids_T[5]} "
    cut, _ = roll_out(1, max_tokens=12, stop=(stop,))
    assert cut[0].finish == "stop"
    assert cut[0].reply == whole[0].reply[: whole[0].reply.index(stop)]
    assert cut[0].ids_T.tolist() == whole[0].ids_T[: len(cut[0].ids_T)].tolist()
    assert stop in Words().decode(cut[0].ids_T[3:])


@pytest.mark.parametrize("prompt", ["", " ".join(["w1"] * 64)])
def test_prompts_that_leave_nothing_to_say(prompt):
    with pytest.raises(TasksError):
        roll_out(1, prompt)
