"""The one loss all algorithms share: a rule's objective, importance weights, KL, entropy, summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from croze.config import Algo
from croze.train.algorithms.assembly import Assembler
from croze.train.algorithms.rule import Rule
from croze.train.protocol import LossInputs
from croze.types import Batch, Group

LOG_RATIO_BOUND = 20.0
"""Log-ratios are held to +-20 nats: exp() stays finite in float32 and beyond it a ratio says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A loss token by token, float64 [N] (``clipped_N``, ``cut_N`` bool), 0 where masked. None: there is no such
    term."""

    loss_N: torch.Tensor
    ratio_N: torch.Tensor
    clipped_N: torch.Tensor
    anchor_kl_N: torch.Tensor
    correction_N: torch.Tensor | None
    cut_N: torch.Tensor | None
    reference_kl_N: torch.Tensor | None
    entropy_N: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient:
    """An ``Algorithm``: a rule (the paper) with the terms that every paper shares.

        loss = sum_t  w_t ( -c_t J_t  +  kl * k3_t  -  entropy * H_t )

    - ``w_t`` the normaliser and ``A`` in ``J_t`` come with the samples, fixed over the optimizer batch;
    - ``c_t = exp(log pi_anchor - log pi_rollout)``, pooled as the rule pools its ratio, without gradient:
      decoupled PPO's correction of a recomputed anchor against the sampler (arXiv:2110.00641), cut at
      ``importance_cap`` (truncated importance sampling), or set to 0 above it (masked). 1 with
      ``importance=none``;
    - ``k3_t = exp(d) - d - 1, d = log pi_reference - log pi`` (Schulman 2020; GRPO, arXiv:2402.03300,
      equation 4);
    - ``H_t`` the entropy of the policy's distribution at t, nats.
    """

    rule: Rule
    algo: Algo
    assembler: Assembler

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def needs_entropy(self) -> bool:
        return self.algo.entropy != 0.0

    @property
    def needs_reference(self) -> bool:
        return self.algo.kl != 0.0

    @property
    def recompute_anchor(self) -> bool:
        return self.algo.anchor == "recomputed"

    def minibatches(self, groups: Sequence[Group], step: int) -> list[Batch]:
        """A step's groups as 1 to ``optim.minibatches`` optimizer batches; see ``Assembler.batches``."""
        return self.assembler.batches(groups, step)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
        """This micro-batch's share of the loss, a float64 scalar with a graph to logprobs_N and entropy_N.

        Figures are sums over the trained tokens, to be summed over micro-batches; divide by ``tokens``:
        ``clipped_tokens`` where the clip binds, ``ratio_sum`` pi / anchor, ``anchor_kl_sum`` k3 from the
        anchor, and where the option is on ``importance_sum``, ``importance_cut_tokens``,
        ``reference_kl_sum``, ``entropy_sum``. Whatever masked tokens hold, NaN included, reaches neither loss
        nor gradient.
        """
        terms = self.terms(inputs)
        figures: dict[str, torch.Tensor] = {
            "tokens": inputs.mask_N > 0,
            "clipped_tokens": terms.clipped_N,
            "ratio_sum": terms.ratio_N,
            "anchor_kl_sum": terms.anchor_kl_N,
        }
        if terms.correction_N is not None and terms.cut_N is not None:
            figures |= {"importance_sum": terms.correction_N, "importance_cut_tokens": terms.cut_N}
        if terms.reference_kl_N is not None:
            figures["reference_kl_sum"] = terms.reference_kl_N
        if terms.entropy_N is not None:
            figures["entropy_sum"] = terms.entropy_N
        loss = terms.loss_N.sum()
        sums = torch.stack([values_N.detach().sum(dtype=torch.float64) for values_N in figures.values()])
        return loss, dict(zip(figures, sums.tolist(), strict=True))

    def terms(self, inputs: LossInputs) -> Terms:
        """What the loss is made of at each token; ``loss`` is the sum of ``loss_N``."""
        trained_N = inputs.mask_N > 0

        def pick(values_N: torch.Tensor) -> torch.Tensor:
            # float64: small differences stay exact, and shares of opposite sign cancel however a batch is cut
            return torch.where(trained_N, values_N, 0.0).double()

        logprobs_N, anchor_N = pick(inputs.logprobs_N), pick(inputs.anchor_N).detach()
        log_ratio_N = _bounded(logprobs_N - anchor_N)
        ratio_N = self.rule.pooled(log_ratio_N, inputs).exp()
        objective_N, clipped_N = self.rule.objective(ratio_N, logprobs_N, pick(inputs.advantages_N))
        correction_N = cut_N = kl_N = entropy_N = None
        if self.algo.importance != "none":
            correction_N, cut_N = self._importance(anchor_N, pick(inputs.rollout_N), inputs)
            objective_N = correction_N * objective_N
            correction_N, cut_N = pick(correction_N), cut_N & trained_N
        term_N = -objective_N
        if self.needs_reference:
            assert inputs.reference_N is not None, "algo.kl needs reference log-probs"
            kl_N = _k3(_bounded(pick(inputs.reference_N) - logprobs_N))
            term_N = term_N + self.algo.kl * kl_N
        if self.needs_entropy:
            assert inputs.entropy_N is not None, "algo.entropy needs the policy's entropies"
            entropy_N = pick(inputs.entropy_N)
            term_N = term_N - self.algo.entropy * entropy_N
        return Terms(
            loss_N=pick(inputs.weights_N) * term_N,
            ratio_N=pick(ratio_N),
            clipped_N=clipped_N & trained_N,
            anchor_kl_N=_k3(log_ratio_N),
            correction_N=correction_N,
            cut_N=cut_N,
            reference_kl_N=kl_N,
            entropy_N=entropy_N,
        )

    def _importance(
        self, anchor_N: torch.Tensor, rollout_N: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """anchor / sampler as a constant weight, and where the cap cut it."""
        correction_N = self.rule.pooled(_bounded(anchor_N - rollout_N.detach()), inputs).exp()
        cut_N = correction_N > self.algo.importance_cap
        above = self.algo.importance_cap if self.algo.importance == "truncate" else 0.0
        return torch.where(cut_N, above, correction_N), cut_N


def _bounded(log_ratio_N: torch.Tensor) -> torch.Tensor:
    return log_ratio_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _k3(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """``exp(d) - 1 - d``: never negative, 0 only at d = 0."""
    return log_ratio_N.expm1() - log_ratio_N
