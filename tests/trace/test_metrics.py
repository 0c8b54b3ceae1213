"""One JSON object a line, whatever happened to the line before."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from croze.errors import InfraFault
from croze.trace.metrics import JsonLines, read_jsonl

_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(records=st.lists(st.dictionaries(st.text(), _value, max_size=4), max_size=5))
def test_records_come_back(records, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any-metrics.jsonl"
    path.unlink(missing_ok=True)
    with JsonLines(path) as lines:
        for record in records:
            lines.write(record)
    assert read_jsonl(path) == records
    assert path.exists() and len(path.read_text(encoding="utf-8").split("\n")) == len(records) + 1


def test_numpy_and_numbers_that_json_lacks(tmp_path):
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as lines:
        lines.write(
            {
                "a": np.float32(0.5),
                "b": np.int64(3),
                "c": np.arange(2),
                "d": math.nan,
                "e": math.inf,
                "p": path,
            }
        )
    assert json.loads(path.read_text()) == {
        "a": 0.5,
        "b": 3,
        "c": [0, 1],
        "d": None,
        "e": None,
        "p": str(path),
    }
    with JsonLines(path) as lines, pytest.raises(TypeError):
        lines.write({"f": object()})


def test_a_line_cut_by_a_crash_at_any_byte_is_taken_out(tmp_path):
    whole = b'{"step":1}\n{"step":2}\n'
    path = tmp_path / "m.jsonl"
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        expected = [{"step": 1}, {"step": 2}][: whole[:length].count(b"\n")]
        assert read_jsonl(path) == expected
        with JsonLines(path) as lines:
            lines.write({"step": 9})
        assert read_jsonl(path) == [*expected, {"step": 9}]


def test_a_long_cut_line_is_taken_out(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\n' + b"x" * 20_000)
    JsonLines(path).close()
    assert path.read_bytes() == b'{"step":1}\n'


def test_no_file_has_no_records(tmp_path):
    assert read_jsonl(tmp_path / "none.jsonl") == []


def test_what_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "faults.jsonl").mkdir()
    with pytest.raises(InfraFault, match="cannot be opened: Is a directory") as caught:
        JsonLines(tmp_path / "faults.jsonl")
    assert caught.value.where == str(tmp_path / "faults.jsonl") and caught.value.fix
