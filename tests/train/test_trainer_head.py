"""The head's log-probs, entropies and hand-written gradients against float64 autograd."""

import numpy as np
import pytest
import torch

import small_models as small
from croze.train.head import CHUNK, Head

ROWS = 2 * CHUNK + 5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_values_and_gradients(temperature, tied, kept):
    """With probabilities kept for the second pass, and with them computed again."""
    rig = small.make_rig(small.architecture(tied=tied), published=torch.float32, measured=False)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, 64, generator=generator)
    targets = torch.randint(0, 307, (ROWS,), generator=generator)
    dlogp, dentropy = torch.randn(2, ROWS, generator=generator)
    parameters = rig.trainer.parameters

    head = Head(rig.weights, hidden, targets, temperature)
    logp, entropy = head.log_probs(entropy=True, keep=kept)
    dhidden = head.backward(dlogp, dentropy, parameters)
    key = rig.weights.layout.head
    assert (key == "lm_head.weight") != tied

    x = hidden.double().requires_grad_()
    w = parameters.masters[key].double().requires_grad_()
    whole = torch.log_softmax(x @ w.t() / temperature, -1)
    wanted_logp = whole.gather(1, targets[:, None])[:, 0]
    wanted_entropy = -(whole.exp() * whole).sum(-1)
    ((wanted_logp * dlogp).sum() + (wanted_entropy * dentropy).sum()).backward()

    assert entropy is not None
    np.testing.assert_allclose(logp, wanted_logp.detach(), rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(entropy, wanted_entropy.detach(), atol=5e-6)
    assert x.grad is not None
    assert w.grad is not None
    assert (dhidden - x.grad).abs().max() < 1e-5 * x.grad.abs().max()
    assert (parameters.grads[key] - w.grad).abs().max() < 1e-5 * w.grad.abs().max()


def test_a_token_of_no_probability_has_finite_values():
    rig = small.make_rig(small.architecture(tied=False), published=torch.float32, measured=False)
    rig.trainer.parameters.masters["lm_head.weight"][7] = 1000.0
    rig.trainer.step(1)
    rig.publish("w1")
    head = Head(rig.weights, torch.ones(2, 64), torch.tensor([3, 7]), 1.0)
    logp, entropy = head.log_probs(entropy=True)
    assert entropy is not None
    assert logp.isfinite().all()
    assert entropy.isfinite().all()
    gradient = head.backward(torch.ones(2), torch.ones(2), rig.trainer.parameters)
    assert gradient.isfinite().all()


def test_without_targets_there_is_nothing():
    rig = small.make_rig(small.architecture(), measured=False)
    logp, entropy = Head(rig.weights, torch.zeros(0, 64), torch.zeros(0, dtype=torch.int64), 1.0).log_probs()
    assert (logp.shape, logp.dtype, entropy) == ((0,), torch.float32, None)
