"""A training in its run folder: every part opened, the controller run to its end, everything closed again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from croze.clock import RealClock
from croze.env.tasks import Cursor
from croze.inference.protocol import Engine
from croze.loop import build
from croze.loop.checkpoints import Checkpoints
from croze.loop.collect import Collector
from croze.loop.controller import Controller
from croze.loop.decisions import Decisions
from croze.loop.declaration import check_siblings
from croze.loop.evaluation import Evaluation
from croze.loop.folder import RunFolder, numerics_at
from croze.loop.interrupt import run_stoppable, while_heard
from croze.loop.ledger import Ledger, SqliteLedger
from croze.loop.look import Look
from croze.loop.recovery import Recovered, recover
from croze.loop.saving import Saver
from croze.loop.start import Result, result
from croze.loop.stop import Stop
from croze.models import numerics
from croze.models.weights import ModelWeights
from croze.reward.judge import Judge
from croze.run import Run
from croze.sync.identity import Identity
from croze.trace import marks
from croze.trace.metrics import JsonLines
from croze.trace.recorder import Recorder
from croze.train import algorithms
from croze.train.protocol import Trainer
from croze.train.save import save_model

OnEvent = Callable[[dict[str, Any]], None]


class Training:
    """One process's work on a run, from where its claimed folder is to the last step; see ``croze.loop.start``.
    ``resumed``: the folder may hold steps to go on from."""

    def __init__(self, run: Run, folder: RunFolder, listen: OnEvent, *, resumed: bool) -> None:
        self.run, self.folder, self.resumed = run, folder, resumed
        self.source, self.held_out = build.held_out(run, run.loop.eval_tasks)
        self.algorithm = algorithms.build(run.algo, run.sampling, minibatches=run.optim.minibatches)
        check_siblings(run, self.algorithm.rule.advantages.min_valid)
        self.stop, self.clock = Stop(), RealClock()
        self._listen = while_heard(listen, self.stop.ask)

    def run_to_end(self) -> Result:
        """All steps that are left. Raises Interrupted, the state saved, on a signal."""
        return run_stoppable(self.go(), self.stop, self._listen, self.run.dir)

    async def go(self) -> Result:
        """To the last step. Raises Interrupted, the state saved, when ``stop`` is asked for."""
        async with AsyncExitStack() as parts:
            ledger = SqliteLedger(self.path / "ledger.sqlite")
            parts.callback(ledger.close)
            checkpoints = Checkpoints(self.path / "checkpoints", keep=self.run.loop.keep)
            faults = parts.enter_context(JsonLines(self.path / "faults.jsonl"))
            tell = _telling(self._listen, faults)
            found = recover(self.path, ledger, checkpoints, faults.write) if self.resumed else Recovered()
            judge = await parts.enter_async_context(
                Judge(self.run.reward, options=self.run.reward_options, sandbox=self.run.sandbox)
            )
            model = await asyncio.to_thread(build.build_model, self.run)
            parts.callback(model.thread.close)
            look = Look(model.tokenizer, model.arch.context, judge.spec)
            self._look_ahead(look)
            self._note_beginnings(model, found.step, tell)
            weights = build.empty_weights(self.run, model)
            trainer = await asyncio.to_thread(build.build_trainer, self.run, model, self.algorithm, weights)
            if found.checkpoint is not None:
                await model.thread.run(trainer.load, found.checkpoint.path / "trainer")
            engine = build.build_engine(self.run, model, weights)
            parts.push_async_callback(engine.close)
            recorder = parts.enter_context(self._recorder(model))
            metrics = parts.enter_context(JsonLines(self.path / "metrics.jsonl"))
            tell(_start(self.run, model))
            if self.resumed:
                tell(_resumed(found))
            controller = Controller(
                self.run,
                engine=engine,
                trainer=trainer,
                algorithm=self.algorithm,
                collector=self._collector(model, engine, judge, look, ledger, recorder, faults, found),
                evaluation=self._evaluation(model, engine, judge),
                identity=Identity(trainer.frozen(), build.weights_recipe(self.run)),
                thread=model.thread,
                ledger=ledger,
                recorder=recorder,
                metrics=metrics,
                saver=self._saver(checkpoints, trainer, model, weights, tell, found),
                stop=self.stop,
                clock=self.clock,
                on_event=tell,
                cut=found.cut,
            )
            weights_id = await controller.train()
        tell({"event": "done", "run_dir": self.run.dir, "weights_id": weights_id})
        return result(self.run, weights_id)

    @property
    def path(self) -> Path:
        return self.folder.path

    def _look_ahead(self, look: Look) -> None:
        """At the held-out tasks, and at the first step's of a run that begins: a wrong one is told at once."""
        for task in self.held_out:
            look.at(task, build.eval_source(self.run).place)
        if not self.resumed:
            stream = self.source.stream(self.run.seed, without=self.held_out)
            for task in itertools.islice(stream, self.run.groups_per_step):
                look.at(task, stream.place)

    def _note_beginnings(self, model: build.Model, step: int, tell: OnEvent) -> None:
        """In config.json, what must be the same for a resume after ``step`` to give the same bytes; told where it is
        not."""
        now, config = build.numerics_told(model), self.folder.config
        then = numerics_at(config, step) or now
        other = [name for name in now if then.get(name) != now[name]]
        if other:
            told = ", ".join(f"{name} was {then.get(name)}, is {now[name]}" for name in other)
            tell({"event": "warning", "message": f"the run goes on, but not bit for bit: {told}"})
        if self.resumed and (doubt := numerics.why_inexact(model.recipe, "a resume")):
            tell({"event": "warning", "message": doubt})
        files = model.files
        kept = [entry for entry in config.get("numerics", ()) if entry["from_step"] <= step]
        if not kept or other:
            kept.append({"from_step": step + 1, **now, "note": model.recipe.note})
        self.folder.amend(
            tasks=self.source.fingerprint(),
            model={"name": files.name, "path": str(files.path), "source": files.source},
            numerics=kept,
        )

    def _recorder(self, model: build.Model) -> Recorder:
        return Recorder(
            self.path / "trace",
            tokens=self.run.trace.tokens,
            spell=lambda token: model.tokenizer.decode([token], special=True),
            clock=self.clock,
        )

    def _collector(
        self,
        model: build.Model,
        engine: Engine,
        judge: Judge,
        look: Look,
        ledger: Ledger,
        recorder: Recorder,
        faults: JsonLines,
        found: Recovered,
    ) -> Collector:
        run = self.run
        cursor = found.state.get("tasks")
        return Collector(
            decisions=Decisions(
                groups_per_step=run.groups_per_step,
                group_size=run.group_size,
                retries=run.loop.retries,
                committed=found.step,
            ),
            ledger=ledger,
            tasks=self.source.stream(
                run.seed,
                without=self.held_out,
                start=None if cursor is None else msgspec.convert(cursor, Cursor),
            ),
            generator=build.build_generator(run, model, engine, self.clock, held_out=False),
            judge=judge,
            look=look,
            recorder=recorder,
            faults=faults,
            clock=self.clock,
        )

    def _evaluation(self, model: build.Model, engine: Engine, judge: Judge) -> Evaluation | None:
        if not self.held_out:
            return None
        apart = build.build_generator(self.run, model, engine, self.clock, held_out=True)
        return Evaluation(self.held_out, apart, judge)

    def _saver(
        self,
        checkpoints: Checkpoints,
        trainer: Trainer,
        model: build.Model,
        weights: ModelWeights,
        tell: OnEvent,
        found: Recovered,
    ) -> Saver:
        return Saver(
            checkpoints,
            trainer,
            lambda tensors, folder: save_model(tensors, model.files, folder, lora=weights.lora),
            lambda: marks.keep(self.path),
            every=self.run.loop.checkpoint_every,
            clock=self.clock,
            on_event=tell,
            saved=found.checkpoint.manifest if found.checkpoint else None,
        )


def _telling(listen: OnEvent, faults: JsonLines) -> OnEvent:
    """Listeners, with what went wrong kept in faults.jsonl too."""

    def tell(event: dict[str, Any]) -> None:
        if event["event"] == "warning" or (event["event"] == "save" and not event["ok"]):
            faults.write(event)
        listen(event)

    return tell


def _start(run: Run, model: build.Model) -> dict[str, Any]:
    return {
        "event": "start",
        "run_dir": run.dir,
        "steps": run.steps,
        "model": model.files.name,
        "source": model.files.source,
        "parameters": model.arch.parameters,
        "dtype": str(model.recipe.dtype).removeprefix("torch."),
        "exact": model.recipe.exact,
        "numerics": model.recipe.note,
    }


def _resumed(found: Recovered) -> dict[str, Any]:
    """From where the run goes on, what is made again, and which checkpoints were passed over."""
    lost = found.resumed
    return {
        "event": "resume",
        "step": found.step,
        "again_steps": lost.steps if lost else 0,
        "again_rollouts": lost.rollouts if lost else 0,
        "broken": [{"checkpoint": b.path.name, "why": b.why} for b in found.broken],
    }
