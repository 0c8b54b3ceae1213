"""The built-in engine without its thread: one ``step`` is schedule, forward, sample, hand out."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from croze.config import EngineOptions
from croze.errors import EngineFault, UsageError
from croze.inference.attention import StepAttention
from croze.inference.cache import KVCache
from croze.inference.fused import FusedStepAttention
from croze.inference.protocol import Chunk, EngineStats, Request
from croze.inference.request import check_request, check_tokens
from croze.inference.sampler import sample
from croze.inference.scheduler import Scheduler, Sequence, Step
from croze.models.packing import Packing
from croze.models.protocol import Tokenizer
from croze.models.teacher import group_attention
from croze.models.transformer import Forward, hidden_states, log_probs, logits
from croze.models.weights import ModelWeights
from croze.types import Sample, WeightsId

STOP_TAIL = 12
"""Tokens decoded, beyond one for each of a stop string's bytes, to look for it."""
SCORE_ROWS = 64
"""Rows of logits computed at a time when scoring."""


class EngineCore:
    """Synchronous and single-threaded; ``TorchEngine`` drives it."""

    def __init__(
        self, weights: ModelWeights, options: EngineOptions, tokenizer: Tokenizer | None = None
    ) -> None:
        self.weights, self.tokenizer = weights, tokenizer
        self.weights_id = WeightsId("")
        self.cache = KVCache(weights.arch, weights.recipe, options.kv_memory_mib << 20)
        self.scheduler = Scheduler(self.cache, options, weights.arch.context)
        self.ops = Forward()
        self.prompt_tokens = self.generated_tokens = self.forwards = 0

    def submit(self, request: Request) -> None:
        """Queue a request; one that can never run raises UsageError here and disturbs nobody."""
        check_request(request, self.weights.arch.vocab)
        if request.params.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer", where=f"request {request.id}")
        self.scheduler.submit(request)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.live or self.scheduler.waiting)

    def load(self, weights_id: WeightsId, tensors: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        """Serve other weights from the next token on. ``tensors`` None: shared weights that already have this id."""
        self.weights_id = WeightsId("")
        if tensors is not None and self.weights.weights_id != weights_id:
            self.weights.update(weights_id, tensors)
        if self.weights.weights_id != weights_id:
            raise EngineFault(f"weights {weights_id[:12]} were not prepared", where="engine commit")
        self.scheduler.weights_changed()
        self.weights_id = weights_id

    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        """One token for everyone who can have one."""
        self._check_weights()
        self.scheduler.admit()
        step = self.scheduler.plan()
        if step is not None:
            logits_BV = self._forward(step)
            self._hand_out(step, logits_BV)
        return self._collect()

    def _check_weights(self) -> None:
        if not self.weights_id or self.weights.weights_id != self.weights_id:
            raise EngineFault(
                "the weights in memory are not the committed ones",
                where="engine",
                fix="publish and commit again",
            )

    def _forward(self, step: Step) -> torch.Tensor:
        device = self.weights.recipe.device
        form = StepAttention if self.weights.recipe.attention == "exact" else FusedStepAttention
        attend = form(self.cache, step.decoding, step.segments)
        ids = torch.tensor(step.ids, device=device)
        positions = torch.tensor(step.positions, device=device)
        x = hidden_states(self.weights, ids, positions, attend, self.ops)
        self.forwards += 1
        self.prompt_tokens += len(step.ids) - len(step.decoding)
        if len(step.rows) != len(step.ids):
            x = x[torch.tensor(step.rows, dtype=torch.int64, device=device)]
        if not step.rows:
            return x.new_zeros(0, self.weights.arch.vocab)
        return logits(self.weights, x, self.ops)

    def _hand_out(self, step: Step, logits_BV: torch.Tensor) -> None:
        rows = [row for row, takers in enumerate(step.takers) for _ in takers]
        takers = [s for group in step.takers for s in group]
        if not takers:
            return
        if len(rows) != logits_BV.shape[0]:
            logits_BV = logits_BV[torch.tensor(rows, device=logits_BV.device)]
        ids, logprobs = sample(
            logits_BV,
            [s.request.params for s in takers],
            [s.key for s in takers],
            [len(s.suffix) for s in takers],
        )
        if not all(map(math.isfinite, logprobs)):
            raise EngineFault(
                f"the model's logits are not finite under weights {self.weights_id[:12]}",
                where="engine",
                fix="training has spoilt the weights, or engine.dtype cannot hold what they make: lower optim.lr"
                " or optim.clip, and resume from before it, or set engine.dtype=float32",
            )
        self.generated_tokens += len(takers)
        for s, token, logprob in zip(takers, ids, logprobs, strict=True):
            s.suffix.append(token)
            s.fresh_ids.append(token)
            s.fresh_logprobs.append(logprob)
            self._finish(s, token)

    def _finish(self, s: Sequence, token: int) -> None:
        params = s.request.params
        if token in params.stop_ids or (params.stop and self._meets_stop(s)):
            s.finish = "stop"
        elif len(s.suffix) >= s.room:
            s.finish = "context" if s.context_bound else "length"

    def _meets_stop(self, s: Sequence) -> bool:
        assert self.tokenizer is not None
        stops = s.request.params.stop
        tail = max(len(t.encode()) for t in stops) + STOP_TAIL
        text = self.tokenizer.decode(s.suffix[s.first :][-tail:])
        return any(t in text for t in stops)

    @torch.inference_mode()
    def abort(self, request_id: str) -> list[Chunk]:
        """End a request's siblings now; what is queued is forgotten."""
        queued = [a for a in self.scheduler.waiting if a.id == request_id]
        for arrival in queued:
            self.scheduler.waiting.remove(arrival)
        for s in self.scheduler.live:
            if s.request.id == request_id:
                s.finish = "aborted"
        return [self._nothing(request_id, i) for a in queued for i in a.siblings] + self._collect()

    def _nothing(self, request_id: str, sibling: int) -> Chunk:
        """The end of a sibling that never started."""
        return Chunk(
            request_id=request_id,
            sibling=sibling,
            ids_T=np.empty(0, np.int32),
            logprobs_T=np.empty(0, np.float32),
            weights_id=self.weights_id,
            finish="aborted",
        )

    def reset(self) -> None:
        """Forget every request: after an error in a step, what is in KV memory is not known."""
        self.scheduler.reset()

    def _collect(self) -> list[Chunk]:
        chunks = [self._chunk(s) for s in self.scheduler.live if s.fresh_ids or s.finish is not None]
        self.scheduler.settle()
        return chunks

    def _chunk(self, s: Sequence) -> Chunk:
        chunk = Chunk(
            request_id=s.request.id,
            sibling=s.sibling,
            ids_T=np.array(s.fresh_ids, np.int32),
            logprobs_T=np.array(s.fresh_logprobs, np.float32),
            weights_id=self.weights_id,
            finish=s.finish,
            waited_s=s.waited_s,
        )
        s.fresh_ids, s.fresh_logprobs = [], []
        return chunk

    @torch.inference_mode()
    def score(self, prompt_P: np.ndarray, suffix_S: np.ndarray, temperature: float) -> np.ndarray:
        """Log-probs fp32 [S] of a suffix, by the trainer's path: equal bit for bit to decoding it."""
        self._check_weights()
        count, arch = len(suffix_S), self.weights.arch
        check_tokens("score", arch.vocab, prompt_P, suffix_S)
        if not 0 < len(prompt_P) <= arch.context - count:
            raise UsageError(
                f"a prompt of {len(prompt_P)} and {count} tokens do not fit a context of {arch.context}",
                where="score",
            )
        nothing = np.zeros(count, np.float32)
        if count == 0:
            return nothing
        sample_ = Sample(
            rollout_id="",
            group_id="",
            prompt_P=prompt_P,
            ids_S=suffix_S,
            mask_S=np.ones(count, bool),
            logprobs_S=nothing,
            advantages_S=nothing,
            weights_S=nothing,
        )
        packing = Packing([sample_], share=True, device=self.weights.recipe.device)
        attend = group_attention(packing, arch, self.weights.recipe)
        x = hidden_states(self.weights, packing.ids_N, packing.positions_N, attend, self.ops)[packing.rows_M]
        found = [
            log_probs(logits(self.weights, x[i : i + SCORE_ROWS], self.ops), t, temperature)
            for i, t in zip(range(0, count, SCORE_ROWS), packing.targets_M.split(SCORE_ROWS), strict=True)
        ]
        return torch.cat(found).cpu().numpy()

    def stats(self) -> EngineStats:
        return EngineStats(
            rows=len(self.scheduler.live),
            queued=len(self.scheduler.waiting),
            kv_bytes=self.cache.bytes,
            kv_limit_bytes=self.cache.limit_bytes,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            forwards=self.forwards,
        )
