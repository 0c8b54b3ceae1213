"""The token record: nothing lost, nothing tokenised twice, every token with its weights."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from croze.errors import EngineFault
from croze.inference.protocol import Chunk
from croze.rollout.session import Session, reply_text
from croze.types import Rollout, Task, WeightsId

TASK = Task(id="t", prompt="p")


def chunk(ids: list[int], weights: str = "w0", finish: str | None = None) -> Chunk:
    return Chunk(
        request_id="r",
        sibling=0,
        ids_T=np.array(ids, np.int32),
        logprobs_T=-np.arange(len(ids), dtype=np.float32) - 1,
        weights_id=WeightsId(weights),
        finish=finish,  # type: ignore[arg-type]
    )


def finished(session: Session) -> Rollout:
    return session.rollout(
        rollout_id="r",
        group_id="g",
        member=1,
        attempt=2,
        task=TASK,
        step=3,
        reply="text",
        t_start=1.0,
        t_end=2.0,
    )


def test_a_finished_record():
    session = Session([1, 2, 3])
    session.take(chunk([7, 8]))
    assert session.finish is None
    session.take(chunk([9], finish="stop"))
    rollout = finished(session)
    assert rollout.ids_T.tolist() == [1, 2, 3, 7, 8, 9]
    assert rollout.mask_T.tolist() == [False] * 3 + [True] * 3
    assert np.isnan(rollout.logprobs_T).tolist() == [True] * 3 + [False] * 3
    assert rollout.logprobs_T[3:].tolist() == [-1, -2, -1]
    assert (rollout.ids_T.dtype, rollout.logprobs_T.dtype, rollout.mask_T.dtype) == (
        np.int32,
        np.float32,
        bool,
    )
    assert [(t.producer, t.start, t.end, t.finish) for t in rollout.turns] == [
        ("prompt", 0, 3, None),
        ("model", 3, 6, "stop"),
    ]
    assert [(w.start, w.end, w.weights_id) for w in rollout.weights] == [(3, 6, "w0")]
    assert (rollout.prompt_tokens, rollout.generated, rollout.finish) == (3, 3, "stop")
    assert session.sampled == [7, 8, 9]


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 99), min_size=1, max_size=5),
    chunks=st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=4), st.sampled_from("abc")), max_size=8),
)
def test_spans_cover_the_sampled_tokens_once(prompt, chunks):
    session = Session(prompt)
    for ids, weights in chunks:
        session.take(chunk(ids, weights))
    session.take(chunk([], "a", "length"))
    rollout = finished(session)
    sampled = [i for ids, _ in chunks for i in ids]
    assert rollout.ids_T.tolist() == prompt + sampled
    told = [str(w.weights_id) for w in rollout.weights for _ in range(w.start, w.end)]
    assert told == [w for ids, w in chunks for _ in ids]
    borders = [len(prompt), *(w.end for w in rollout.weights)]
    assert [w.start for w in rollout.weights] == borders[:-1]
    assert borders[-1] == len(rollout.ids_T)
    assert all(w.start < w.end for w in rollout.weights)
    assert all(
        a.weights_id != b.weights_id for a, b in zip(rollout.weights, rollout.weights[1:], strict=False)
    )
    assert rollout.turns[0].end == rollout.turns[1].start == len(prompt)
    assert rollout.turns[-1].end == len(rollout.ids_T)


def test_an_aborted_reply_may_be_empty():
    session = Session([1])
    session.take(chunk([], finish="aborted"))
    rollout = finished(session)
    assert (rollout.generated, rollout.weights, session.sampled) == (0, (), [])


def test_tokens_after_the_end_are_a_fault():
    session = Session([1])
    session.take(chunk([5], finish="stop"))
    with pytest.raises(EngineFault, match="after a sibling's end"):
        session.take(chunk([6]))


class Words:
    """Token i reads "w<i> "; 0 is a special token."""

    eos_ids: tuple[int, ...] = (0,)
    vocab_size = 100

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return [int(w[1:]) for w in text.split()]

    def decode(self, ids, *, special: bool = False) -> str:
        return "".join(f"w{i} " for i in ids if i or special)

    def render(self, prompt) -> list[int]:
        return self.encode(prompt)


def test_the_reply_ends_before_the_first_stop_string():
    words = Words()
    assert reply_text(words, [3, 4, 5, 0], ()) == "w3 w4 w5 "
    assert reply_text(words, [3, 4, 5, 0], ("w5", "w4")) == "w3 "
    assert reply_text(words, [3, 4], ("w9",)) == "w3 w4 "
    assert reply_text(words, [], ("w9",)) == ""
