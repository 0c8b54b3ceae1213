"""Weights ids: equal for equal content, different after any change, blind to everything else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import small_models as small
from croze.models.weights import LoraSpec
from croze.sync.identity import Identity

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.ones(4, dtype=torch.bfloat16),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 5),
}


def identity(tensors: dict[str, torch.Tensor], **options: object) -> str:
    return Identity(**options).of(tensors.items())  # type: ignore[arg-type]


BASE = identity(TENSORS)


def test_ids_stay_what_they_are():
    """Ids are stored in ledgers and traces: this one must never change."""
    golden = "14aaa26ab247a6bdba7a65c616b326add978511befc67ce4bd24589204a90c6b"
    assert identity({"a": torch.tensor([1.0, -2.0])}) == golden
    assert len(bytes.fromhex(BASE)) == 32


def test_order_and_storage_do_not_count():
    backwards = dict(reversed(TENSORS.items()))
    assert identity(backwards) == BASE
    strided = TENSORS | {"a": TENSORS["a"].t().contiguous().t()}
    assert not strided["a"].is_contiguous()
    assert identity(strided) == BASE
    assert identity(TENSORS | {"a": TENSORS["a"].clone().requires_grad_()}) == BASE
    view = torch.zeros(3, 3)
    view[1:] = TENSORS["a"]
    assert identity(TENSORS | {"a": view[1:]}) == BASE


@pytest.mark.parametrize(
    "change",
    [
        {"a": TENSORS["a"].view(3, 2)},
        {"a": TENSORS["a"].view(6)},
        {"a": TENSORS["a"].double()},
        {"a": TENSORS["a"].view(torch.int32)},
        {"b": TENSORS["b"].half()},
        {"b": torch.ones(5, dtype=torch.bfloat16)},
        {"scalar": torch.tensor([3.0])},
        {"empty": torch.empty(5, 0)},
        {"c": torch.ones(1)},
    ],
)
def test_dtype_shape_and_names_count(change):
    assert identity(TENSORS | change) != BASE


def test_a_missing_a_renamed_and_a_swapped_tensor():
    assert identity({n: t for n, t in TENSORS.items() if n != "empty"}) != BASE
    assert identity({n.replace("b", "B"): t for n, t in TENSORS.items()}) != BASE
    x, y = torch.zeros(2), torch.ones(2)
    assert identity({"x": x, "y": y}) != identity({"x": y, "y": x})


@settings(max_examples=50, deadline=None)
@given(byte=st.integers(0, 23), bit=st.integers(0, 7))
def test_one_flipped_bit_is_another_id(byte, bit):
    flipped = TENSORS["a"].clone()
    flipped.view(-1).view(torch.uint8)[byte] ^= 1 << bit
    assert identity(TENSORS | {"a": flipped}) != BASE


def test_zero_and_minus_zero_are_different_content():
    assert identity({"a": torch.tensor([0.0])}) != identity({"a": torch.tensor([-0.0])})


def test_frozen_tensors_belong_to_every_id():
    frozen = {n: TENSORS[n] for n in ("a", "b")}
    rest = {n: t for n, t in TENSORS.items() if n not in frozen}
    assert Identity(frozen.items()).of(rest.items()) == BASE
    assert Identity((frozen | {"a": TENSORS["a"] + 1}).items()).of(rest.items()) != BASE


def test_the_recipe_counts():
    assert identity(TENSORS, recipe="int8") != BASE
    assert identity(TENSORS, recipe="int8") != identity(TENSORS, recipe="int4")


def test_two_trainers_that_reach_the_same_weights_have_the_same_id():
    for lora in (None, LoraSpec(rank=2, scale=1.0, targets=("q_proj",))):
        ids = []
        for _ in range(2):
            rig = small.make_rig(small.architecture(), lora=lora, measured=False)
            whole = Identity(rig.trainer.frozen())
            ids.append([whole.of(rig.trainer.export())])
            rig.trainer.forward_backward(small.batch(small.random_samples(307, [(9, (12,))])))
            rig.trainer.step(1)
            ids[-1].append(whole.of(rig.trainer.export()))
        assert ids[0] == ids[1]
        assert ids[0][0] != ids[0][1]
