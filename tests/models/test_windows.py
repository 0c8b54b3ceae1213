"""Sliding windows in training: right against transformers, and sharing prompts stays right."""

import msgspec
import numpy as np
import pytest
import torch

import small_models as small
from croze.config import Optim
from croze.models import kernels
from croze.models.architecture import from_config
from peer_models import WINDOWED, hugging_face

GROUPS = [(7, (5, 9, 1)), (40, (33, 2, 16)), (64, (20, 20))]


def samples(vocab: int) -> list:
    """Prompts of one group begin like another's, so that beginnings are shared too."""
    made = small.random_samples(vocab, GROUPS)
    longer = np.concatenate([made[3].prompt_P[:30], made[0].prompt_P])
    for i, sample in enumerate(made[:2]):
        made.append(msgspec.structs.replace(sample, group_id="alike", rollout_id=f"a/{i}", prompt_P=longer))
    return made


def rig_of(name: str) -> small.Rig:
    model = hugging_face(name)
    return small.make_rig(
        from_config(model.config.to_dict()),
        tensors=model.state_dict(),
        published=torch.float32,
        optim=Optim(),
        measured=False,
    )


@pytest.mark.parametrize("name", WINDOWED)
def test_gradients_equal_autograd_through_transformers(name):
    model, rig = hugging_face(name), rig_of(name)
    model.zero_grad()
    given = samples(97)
    loss, found = small.gradients(rig.trainer, given)
    total = 0.0
    for s in given:
        ids = torch.from_numpy(np.concatenate([s.prompt_P, s.ids_S]).astype(np.int64))[None]
        start = len(s.prompt_P)
        logprobs = torch.log_softmax(model(ids).logits[0], -1)[start - 1 : -1]
        picked = logprobs.gather(1, ids[0, start:, None])[:, 0]
        share = -(picked * torch.from_numpy(s.advantages_S * s.weights_S)).sum()
        share.backward()
        total += share.item()
    assert loss == pytest.approx(total, rel=1e-5)
    assert small.relative_gap(found, {n: p.grad for n, p in model.named_parameters()}) < 1e-5


@pytest.mark.parametrize("name", WINDOWED)
def test_sharing_prompts_changes_no_gradient(name):
    rig, given = rig_of(name), samples(97)
    loss, shared = small.gradients(rig.with_optim(share_prompt=True), given)
    plain_loss, plain = small.gradients(rig.with_optim(share_prompt=False), given)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert small.relative_gap(shared, plain) < 1e-5


def test_a_window_matters():
    """The cases above would not notice a window that is never read, unless it changes the result."""
    for name in WINDOWED:
        rig, given = rig_of(name), samples(97)
        whole = small.make_rig(
            msgspec.structs.replace(rig.arch, windows=()),
            tensors=hugging_face(name).state_dict(),
            published=torch.float32,
            measured=False,
        )
        one, other = rig.trainer.logprobs(given), whole.trainer.logprobs(given)
        assert max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True)) > 1e-2


def test_what_a_query_attends_to():
    places = torch.arange(6)
    for window in (0, 1, 3, 9):
        seen = ~kernels.hidden(places[2:], places, window)
        for row, query in zip(seen, range(2, 6), strict=True):
            assert row.nonzero()[:, 0].tolist() == list(range(max(0, query - (window or 6) + 1), query + 1))
