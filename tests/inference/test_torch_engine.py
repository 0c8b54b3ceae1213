"""The engine behind an event loop: streams, aborts, pauses, commits, and errors that reach every waiter."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest

import small_models as small
from croze.config import EngineOptions
from croze.errors import CrozeError, EngineFault, UsageError
from croze.inference.core import EngineCore
from croze.inference.protocol import Chunk, Request
from croze.inference.torch_engine import TorchEngine
from croze.models.device import ComputeThread
from croze.models.weights import ModelWeights
from croze.types import WeightsId

ARCH = small.architecture(layers=1, context=512)
DEADLINE_S = 20.0


@asynccontextmanager
async def serving(
    rig: small.Rig | None = None, **options: object
) -> AsyncIterator[tuple[TorchEngine, small.Rig]]:
    """An engine that serves "w0" on a compute thread of its own."""
    rig = rig or small.make_rig(ARCH, measured=False)
    thread = ComputeThread(1)
    engine = TorchEngine(EngineCore(rig.weights, EngineOptions(**options)), thread)  # type: ignore[arg-type]
    try:
        await engine.prepare(rig.weights.weights_id, ())
        await engine.commit(rig.weights.weights_id)
        yield engine, rig
    finally:
        await engine.close()
        thread.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(bounded())


async def gather(engine: TorchEngine, request: Request) -> dict[int, list[Chunk]]:
    chunks: dict[int, list[Chunk]] = {}
    async with aclosing(engine.generate(request)) as stream:
        async for chunk in stream:
            chunks.setdefault(chunk.sibling, []).append(chunk)
    return chunks


def ids(chunks: list[Chunk]) -> list[int]:
    return [i for c in chunks for i in c.ids_T.tolist()]


def test_streams_give_what_the_core_gives():
    async def scenario() -> None:
        async with serving() as (engine, rig):
            requests = [small.request(n, range(k, k + 9), 2, max_tokens=11) for n, k in (("a", 1), ("b", 50))]
            streams = await asyncio.gather(*(gather(engine, r) for r in requests))
            alone = small.drive(rig.engine(), requests)
            for r, stream in zip(requests, streams, strict=True):
                for sibling, chunks in stream.items():
                    assert ids(chunks) == alone[r.id, sibling].ids
                    assert [c.finish for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
            assert engine.stats().rows == 0

    run(scenario)


def test_closing_a_stream_aborts_its_request():
    async def scenario() -> None:
        async with serving() as (engine, _):
            async with aclosing(engine.generate(small.request("x", [1], 3, max_tokens=400))) as stream:
                async for _chunk in stream:
                    break
            assert engine.stats().rows == 0
            again = await gather(engine, small.request("x", [1], 1, max_tokens=3))  # the name is free again
            assert len(ids(again[0])) == 3

    run(scenario)


def test_abort_ends_waiting_and_live_requests():
    async def scenario() -> None:
        async with serving(max_rows=2) as (engine, _):
            live = asyncio.create_task(gather(engine, small.request("live", [1], 2, max_tokens=400)))
            waiting = asyncio.create_task(gather(engine, small.request("waiting", [1], 2, max_tokens=400)))
            while engine.stats().queued != 1:
                await asyncio.sleep(0.001)
            for name, task in (("waiting", waiting), ("live", live)):
                await engine.abort(name)
                assert {chunks[-1].finish for chunks in (await task).values()} == {"aborted"}
            await engine.abort("unknown")

    run(scenario)


def test_an_aborted_request_ends_while_the_engine_is_paused():
    async def scenario() -> None:
        async with serving() as (engine, _):
            task = asyncio.create_task(gather(engine, small.request("x", [1], 2, max_tokens=400)))
            while engine.stats().generated_tokens < 4:
                await asyncio.sleep(0.001)
            await engine.pause()
            await engine.abort("x")
            assert {c[-1].finish for c in (await task).values()} == {"aborted"}
            await engine.resume()
            assert await engine.health() > 0

    run(scenario)


def test_pause_commit_resume_with_requests_in_flight():
    """Tokens before and after carry the right id; while paused none comes; the engine has weights of its own."""

    async def scenario() -> None:
        trainer = small.make_rig(ARCH, measured=False)
        weights = ModelWeights(ARCH, trainer.weights.recipe)
        weights.update(WeightsId("w0"), trainer.trainer.export())
        own = small.Rig(weights, trainer.trainer)
        async with serving(own) as (engine, _):
            task = asyncio.create_task(gather(engine, small.request("x", [1, 2], 2, max_tokens=60)))
            while engine.stats().generated_tokens < 8:
                await asyncio.sleep(0.001)
            await engine.pause()
            count = engine.stats().generated_tokens
            with pytest.raises(EngineFault, match="paused"):
                await engine.health()
            for master in trainer.trainer.parameters.masters.values():
                master.mul_(1.5)
            await engine.prepare(WeightsId("w1"), trainer.trainer.export())
            await asyncio.sleep(0.02)
            assert engine.stats().generated_tokens == count
            assert engine.weights_id == "w0"
            await engine.commit(WeightsId("w1"))
            await engine.resume()
            chunks = await task
            for sibling in range(2):
                told = [c.weights_id for c in chunks[sibling] for _ in c.ids_T]
                assert told == ["w0"] * (count // 2) + ["w1"] * (60 - count // 2)

    run(scenario)


def test_commit_wants_what_was_prepared():
    async def scenario() -> None:
        async with serving() as (engine, _):
            with pytest.raises(EngineFault, match="not prepared"):
                await engine.commit(WeightsId("w5"))
            await engine.prepare(WeightsId("w5"), ())
            with pytest.raises(CrozeError):
                await engine.commit(WeightsId("w5"))  # prepared, with nothing in it
            with pytest.raises(EngineFault, match="committed"):
                await engine.health()

    run(scenario)


def test_shared_weights_that_moved_on_are_not_served():
    async def scenario() -> None:
        async with serving() as (engine, rig):
            task = asyncio.create_task(gather(engine, small.request("x", [1], max_tokens=400)))
            while engine.stats().generated_tokens < 3:
                await asyncio.sleep(0.001)
            await engine.pause()
            rig.publish("w1")
            await engine.resume()
            with pytest.raises(EngineFault, match="not the committed ones"):
                await task
            await engine.prepare(WeightsId("w1"), ())
            await engine.commit(WeightsId("w1"))
            after = await gather(engine, small.request("y", [1], max_tokens=3))
            assert after[0][-1].weights_id == "w1"

    run(scenario)


def test_an_error_in_a_step_reaches_every_waiter_and_the_engine_recovers(caplog):
    """The model breaks with requests live and queued: all learn of it, none hangs, and a repaired engine serves."""

    async def scenario() -> None:
        async with serving(max_rows=4) as (engine, rig):
            tasks = [
                asyncio.create_task(gather(engine, small.request(f"r{i}", [1, i], 2, max_tokens=400)))
                for i in range(4)
            ]
            while engine.stats().queued != 2:
                await asyncio.sleep(0.001)
            await engine.pause()
            norm = rig.weights.norm.weight
            rig.weights.norm.weight = norm[:3]  # shapes that do not fit: an error that is none of croze's own
            await engine.resume()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(e) for e in found] == [EngineFault] * 4
            assert len({id(e) for e in found}) == 4
            assert engine.stats().rows == engine.stats().queued == 0
            rig.weights.norm.weight = norm
            assert len(ids((await gather(engine, small.request("r0", [1, 0], max_tokens=3)))[0])) == 3
            assert await engine.health() > 0

    run(scenario)
    assert "the engine's step failed" in caplog.text


def test_a_bad_request_hurts_nobody_else():
    async def scenario() -> None:
        async with serving() as (engine, _):
            good = asyncio.create_task(gather(engine, small.request("good", [1], 2, max_tokens=50)))
            with pytest.raises(UsageError, match="vocabulary"):
                await gather(engine, small.request("bad", [5000]))
            with pytest.raises(UsageError, match="already running"):
                await asyncio.sleep(0)
                await gather(engine, small.request("good", [1]))
            assert len(ids((await good)[0])) == 50

    run(scenario)


def test_close_ends_every_wait():
    async def scenario() -> None:
        async with serving(max_rows=1) as (engine, _):
            tasks = [
                asyncio.create_task(gather(engine, small.request(n, [1], max_tokens=500)))
                for n in ("live", "queued")
            ]
            while engine.stats().queued != 1:
                await asyncio.sleep(0.001)
            await engine.close()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(e) for e in found] == [EngineFault] * 2
            with pytest.raises(EngineFault, match="closed"):
                await gather(engine, small.request("late", [1]))

    run(scenario)


def test_score_runs_beside_generation():
    async def scenario() -> None:
        async with serving() as (engine, rig):
            task = asyncio.create_task(gather(engine, small.request("x", [1, 2], max_tokens=30)))
            prompt, suffix = np.array([1, 2], np.int32), np.arange(5, dtype=np.int32)
            found = await engine.score(prompt, suffix, 0.7)
            np.testing.assert_array_equal(found, rig.engine().score(prompt, suffix, 0.7))
            assert len(ids((await task)[0])) == 30

    run(scenario)


def test_the_compute_thread_has_its_own_thread_count():
    import torch

    thread = ComputeThread(2)
    try:
        assert thread.run_now(torch.get_num_threads) == 2
    finally:
        thread.close()
    spare = ComputeThread()
    assert spare.threads >= 1
    spare.close()
