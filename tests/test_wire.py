"""What is encoded arrives; what cannot travel or is malformed is refused."""

import asyncio
import contextlib
from typing import Any

import hypothesis.extra.numpy as npst
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from croze import wire
from croze.errors import DeclarationError
from croze.types import Outcome, Rollout, Task, Turn, WeightsId, WeightsSpan

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

ARRAYS = npst.arrays(
    dtype=st.one_of(
        npst.boolean_dtypes(),
        npst.integer_dtypes(),
        npst.unsigned_integer_dtypes(),
        npst.floating_dtypes(),
        npst.complex_number_dtypes(),
        npst.byte_string_dtypes(min_len=1),
        npst.unicode_string_dtypes(min_len=1),
        npst.datetime64_dtypes(),
    ),
    shape=npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@given(ARRAYS)
def test_arrays_arrive_whole_and_writable(array):
    for back in (wire.decode(wire.encode(array), np.ndarray), wire.decode(wire.encode([array]), list)[0]):
        assert same(array, back) and back.flags.writeable and back.flags.c_contiguous


@given(PLAIN)
def test_plain_values_arrive(value):
    assert wire.decode(wire.encode(value), Any) == value


def rollout(columns: dict, tokens: int) -> Rollout:
    return Rollout(
        id="r",
        group_id="g",
        member=0,
        attempt=0,
        task=Task(id="t", prompt=[{"role": "user", "content": "hi"}], columns=columns),
        step=3,
        prompt_tokens=1,
        ids_T=np.arange(tokens, dtype=np.int32),
        logprobs_T=np.full(tokens, np.nan, np.float32),
        mask_T=np.arange(tokens) > 0,
        turns=(Turn(producer="model", start=1, end=tokens, finish="stop"),),
        weights=(WeightsSpan(start=1, end=tokens, weights_id=WeightsId("w")),),
        finish="stop",
        reply="45",
        outcome=Outcome(score=0.5, parts={"a": 0.5}),
    )


@given(st.dictionaries(st.text(), PLAIN | ARRAYS, max_size=3), st.integers(0, 50))
@settings(max_examples=40)
def test_rollouts_arrive(columns, tokens):
    sent = rollout(columns, tokens)
    back = wire.decode(wire.encode(sent), Rollout)
    for name in ("ids_T", "logprobs_T", "mask_T"):
        assert same(getattr(sent, name), getattr(back, name))
    assert (back.turns, back.weights, back.outcome, back.reply) == (
        sent.turns,
        sent.weights,
        sent.outcome,
        sent.reply,
    )
    for name, value in columns.items():
        got = back.task.columns[name]
        assert same(value, got) if isinstance(value, np.ndarray) else got == value


def test_scalars_and_views_travel():
    assert wire.decode(wire.encode([np.float32(0.5), np.int64(3), np.bool_(True)]), list) == [0.5, 3, True]
    view = np.arange(12).reshape(3, 4)[::-1, ::2].T
    assert same(np.ascontiguousarray(view), wire.decode(wire.encode(view), np.ndarray))


@pytest.mark.parametrize(
    "value",
    [
        object(),
        2**70,
        np.array([object()]),
        np.zeros(2, dtype=[("a", "i4")]),
        lambda: 0,
        {"x": {1, object()}},
    ],
)
def test_what_cannot_travel_is_refused(value):
    with pytest.raises(DeclarationError, match="another process"):
        wire.encode({"column": value})


def test_endless_nesting_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(DeclarationError):
        wire.encode(loop)


def packed(dtype, shape, raw, code=1):
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode((dtype, shape, raw))))


@pytest.mark.parametrize(
    "data",
    [
        packed("O", [1], b"12345678"),
        packed("i4,i4", [1], b"12345678"),
        packed("no", [1], b"1"),
        packed("<f4", [2], b"1234"),
        packed("<f4", [-1], b"1234"),
        packed("<f4", [1], b"123"),
        packed("<f4", [1], b"1234", code=9),
        msgspec.msgpack.encode("text"),
        b"\xc1",
        b"",
    ],
)
def test_malformed_arrays_are_refused(data):
    with pytest.raises(msgspec.DecodeError):
        wire.decode(data, np.ndarray)


@given(st.binary(max_size=60))
def test_any_bytes_decode_or_are_refused(data):
    with contextlib.suppress(msgspec.DecodeError):
        wire.decode(data, Rollout)


@given(st.lists(st.binary(max_size=200), max_size=5), st.integers(0, 20))
@settings(max_examples=25)
def test_frames_survive_any_chunking_and_a_torn_end_is_the_end(messages, cut):
    stream = b"".join(wire.frame(m) for m in messages)
    torn = stream[: max(0, len(stream) - cut)]

    async def read(data):
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        out = []
        while (m := await wire.read_frame(reader)) is not None:
            out.append(m)
        return out

    assert asyncio.run(read(stream)) == messages
    back = asyncio.run(read(torn))
    assert back == messages[: len(back)]
