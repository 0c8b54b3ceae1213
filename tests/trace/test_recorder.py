"""The trace: what is written is read, while it is written, after a crash at any byte, after a resume."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import croze.trace.tables as tables
from croze.clock import VirtualClock
from croze.errors import InfraFault, UsageError
from croze.trace.reader import TraceReader
from croze.trace.recorder import Recorder, RolloutRow
from croze.trace.tables import read_table, table_files
from croze.types import Outcome, Rollout, Task, Turn, WeightsId, WeightsSpan
from traces import add_span


def make_rollout(group: int = 0, member: int = 0, *, step: int = 1, generated: int = 4, **changes) -> Rollout:
    prompt = 3
    n = prompt + generated
    logprobs = np.full(n, np.nan, dtype=np.float32)
    logprobs[prompt:] = -np.arange(1, generated + 1, dtype=np.float32)
    weights = (WeightsSpan(start=prompt, end=n, weights_id=WeightsId("w0")),)
    values = {
        "id": f"g{group}.{member}.0",
        "group_id": f"g{group}",
        "member": member,
        "attempt": 0,
        "task": Task(id=f"0.{group}", prompt=[{"role": "user", "content": "1+1"}], columns={"answer": "2"}),
        "step": step,
        "prompt_tokens": prompt,
        "ids_T": np.arange(n, dtype=np.int32),
        "logprobs_T": logprobs,
        "mask_T": np.arange(n) >= prompt,
        "turns": (Turn(producer="prompt", start=0, end=prompt), Turn(producer="model", start=prompt, end=n)),
        "weights": weights,
        "finish": "stop",
        "reply": "2",
        "outcome": Outcome(score=1.0, parts={"right": 1.0}),
        "t_start": 1.0,
        "t_end": 2.5,
    }
    return Rollout(**(values | changes))


def test_what_is_recorded_is_read(tmp_path):
    clock = VirtualClock(start=100.0)
    with Recorder(tmp_path / "trace", clock=clock, wall=1_000_000.0) as recorder:
        with recorder.span("decode", step=1, rollout_id="g0.0.0", role="engine") as decode:
            decode.work(tokens=4, concurrency=2.5)
            decode.work(tokens=3)
        train = add_span(
            recorder, "train", 101.0, 103.0, enabler=decode, enabler_type="data", step=1, requested=100.5
        )
        train.work(tokens=7, rollouts=1)
        pieces = ["a", "b", "c", "d", "e", "f", "g"]
        turns = ({"called": 1.0, "it's": -0.5}, {})
        told = Outcome(score=1.0, parts={"right": 1.0}, turns=turns)
        recorder.rollout(make_rollout(outcome=told), pieces=pieces, advantage=0.5, max_gap=0.0)
        recorder.rollout(make_rollout(1, 2, outcome=Outcome(valid=False, fault="infra", message="gone")))
        recorder.row(
            RolloutRow(
                rollout_id="g1.3.0",
                group_id="g1",
                member=3,
                attempt=0,
                step=1,
                task_id="0.1",
                prompt="x",
                fault="infra",
            )
        )
    with TraceReader(tmp_path) as reader:
        spans = reader.query("SELECT * FROM spans ORDER BY span_id")
        assert [s["stave"] for s in spans] == ["decode", "train"]
        assert (spans[0]["tokens"], spans[0]["concurrency"], spans[0]["ok"]) == (7, 2.5, True)
        assert spans[1]["enabler_span_id"] == spans[0]["span_id"] == decode.span_id
        assert [spans[1][k] for k in ("t_request", "t_start", "t_end")] == [
            1_000_000.5,
            1_000_001.0,
            1_000_003.0,
        ]
        first, second, third = reader.rollouts()
        assert first["score"] == 1.0 and first["parts"] == '{"right":1.0}' and first["turns"] == 1
        assert first["prompt"] == '[{"role":"user","content":"1+1"}]'
        assert (first["t_start"], first["advantage"], first["max_gap"]) == (999_901.0, 0.5, 0.0)
        assert (first["weights_id_first"], first["weights_id_last"]) == ("w0", "w0")
        assert (second["score"], second["valid"], second["fault"], second["message"]) == (
            None,
            False,
            "infra",
            "gone",
        )
        assert (third["reply"], third["t_start"]) == (None, None)
        assert first["turn_parts"] == list(turns) and second["turn_parts"] == third["turn_parts"] == []
        found = reader.query("SELECT turn_parts[1]['it''s'] AS part FROM rollouts WHERE len(turn_parts) > 0")
        assert found == [{"part": -0.5}]
        tokens = reader.tokens("g0.0.0")
        assert [t["text"] for t in tokens] == pieces
        assert [t["logprob"] for t in tokens] == [None] * 3 + [-1.0, -2.0, -3.0, -4.0]
        assert [t["producer"] for t in tokens] == ["prompt"] * 3 + ["model"] * 4
        assert [t["weights_id"] for t in tokens] == [None] * 3 + ["w0"] * 4
        assert [t["mask"] for t in tokens] == [False] * 3 + [True] * 4
        assert [t["position"] for t in tokens] == [t["token_id"] for t in tokens] == list(range(7))
        assert [t["text"] for t in reader.tokens("g1.2.0")] == [None] * 7
        assert reader.tokens("g1.3.0") == []


def test_an_exception_in_a_span_passes_and_is_noted(tmp_path):
    with Recorder(tmp_path / "trace") as recorder, pytest.raises(KeyError), recorder.span("reward"):
        raise KeyError("x")
    with TraceReader(tmp_path) as reader:
        assert [s["ok"] for s in reader.query("SELECT ok FROM spans")] == [False]


def test_times_are_unix_seconds(tmp_path):
    with Recorder(tmp_path / "trace") as recorder, recorder.span("train"):
        time.sleep(0.01)
    (span,) = read_table(tmp_path / "trace" / "spans", "spans").to_pylist()
    assert abs(span["t_end"] - time.time()) < 5
    assert 0.009 < span["t_end"] - span["t_start"] < 5


def test_tokens_are_not_kept_when_not_wanted(tmp_path):
    with Recorder(tmp_path / "trace", tokens=False) as recorder:
        recorder.rollout(make_rollout())
    with TraceReader(tmp_path) as reader:
        assert reader.count() == 1 and reader.query("SELECT * FROM tokens") == []


def test_a_reader_sees_flushed_steps_while_the_run_writes(tmp_path):
    recorder = Recorder(tmp_path / "trace")
    for step in (1, 2, 3):
        recorder.rollout(make_rollout(step, step=step))
        with TraceReader(tmp_path) as reader:
            assert reader.count() == step - 1
        recorder.flush()
        with TraceReader(tmp_path) as reader:
            assert [r["step"] for r in reader.rollouts()] == list(range(1, step + 1))
    recorder.close()


def test_a_resumed_run_appends_with_new_span_ids(tmp_path):
    ids = []
    for _ in range(3):
        with Recorder(tmp_path / "trace") as recorder:
            ids += [add_span(recorder, "train", 0, 1).span_id for _ in range(5)]
    assert len(set(ids)) == 15
    found = read_table(tmp_path / "trace" / "spans", "spans")["span_id"].to_pylist()
    assert found == ids
    assert len(table_files(tmp_path / "trace" / "spans")) == 3


def test_a_large_file_rolls_over(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROLL_BYTES", 2_000)
    with Recorder(tmp_path / "trace") as recorder:
        for step in range(20):
            add_span(recorder, "train", step, step + 1, step=step)
            recorder.flush()
    assert len(table_files(tmp_path / "trace" / "spans")) > 1
    assert read_table(tmp_path / "trace" / "spans", "spans")["step"].to_pylist() == list(range(20))


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """Each table's file after three flushes, and its size after each."""
    folder = tmp_path_factory.mktemp("trace")
    recorder = Recorder(folder)
    sizes: dict[str, list[int]] = {table: [] for table in tables.TABLES}
    for step in (1, 2, 3):
        add_span(recorder, "train", 0, 1, step=step)
        recorder.rollout(make_rollout(step, step=step), pieces=list("abcdefg"))
        recorder.flush()
        for table in tables.TABLES:
            sizes[table].append(table_files(folder / table)[0].stat().st_size)
    recorder.close()
    return folder, sizes


@pytest.mark.parametrize("table", tables.TABLES)
def test_a_crash_at_any_byte_loses_only_the_batch_it_cut(three_steps, table, tmp_path):
    folder, sizes = three_steps
    data = table_files(folder / table)[0].read_bytes()
    cut = tmp_path / "000001.arrows"
    cut.write_bytes(data)
    near_an_edge = {size + around for size in sizes[table] for around in range(-12, 13)}
    for length in sorted(near_an_edge | {*range(0, len(data), 11), len(data)}, reverse=True):
        os.truncate(cut, length)
        whole = sum(size <= length for size in sizes[table])
        assert read_table(tmp_path, table).num_rows == whole, length


@settings(max_examples=50, deadline=None)
@given(length=st.integers(0, 10**6), zeros=st.integers(1, 500))
def test_a_tail_of_zeros_after_a_power_cut_is_no_row(three_steps, length, zeros, tmp_path_factory):
    folder, sizes = three_steps
    data = table_files(folder / "spans")[0].read_bytes()
    length = sizes["spans"][length % 3]
    file = tmp_path_factory.getbasetemp() / "zeros"
    file.mkdir(exist_ok=True)
    (file / "000001.arrows").write_bytes(data[:length] + bytes(zeros))
    assert read_table(file, "spans").num_rows == sizes["spans"].index(length) + 1


def test_a_killed_run_leaves_a_readable_trace(tmp_path):
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from croze.trace.recorder import Recorder
        recorder = Recorder(Path(sys.argv[1]) / "trace")
        for step in range(10**6):
            recorder.end(recorder.begin("train", step=step))
            recorder.flush()
            print(step, flush=True)
    """)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 50:
                break
        os.kill(process.pid, signal.SIGKILL)
        said = [50, *map(int, process.stdout.read().split())][-1]
    steps = read_table(tmp_path / "trace" / "spans", "spans")["step"].to_pylist()
    assert steps == list(range(len(steps))) and len(steps) > said
    with Recorder(tmp_path / "trace") as recorder:
        add_span(recorder, "train", 0, 1, step=-1)
    assert read_table(tmp_path / "trace" / "spans", "spans")["step"].to_pylist() == [*steps, -1]


def test_a_file_of_an_older_schema_reads_with_nulls(tmp_path):
    older = pa.schema([("stave", pa.string()), ("step", pa.int32())])
    with pa.OSFile(str(tmp_path / "000001.arrows"), "wb") as file, pa.ipc.new_stream(file, older) as stream:
        stream.write_batch(pa.record_batch([["train"], pa.array([3], pa.int32())], schema=older))
    (span,) = read_table(tmp_path, "spans").to_pylist()
    assert (span["stave"], span["step"], span["role"], span["tokens"]) == ("train", 3, None, None)


def test_a_run_of_before_reads_beside_a_newer_one(tmp_path):
    newest = tables.schema("rollouts")
    older = pa.schema([field for field in newest if field.name != "turn_parts"])
    folder = tmp_path / "trace" / "rollouts"
    folder.mkdir(parents=True)
    row = {"rollout_id": "g0.0.0", "group_id": "g0", "parts": '{"a":1.0}', "score": 1.0, "step": 1}
    with pa.OSFile(str(folder / "000001.arrows"), "wb") as file, pa.ipc.new_stream(file, older) as stream:
        stream.write_batch(pa.RecordBatch.from_pylist([row], schema=older))
    with Recorder(tmp_path / "trace") as recorder:
        recorder.rollout(make_rollout(1, step=2, outcome=Outcome(score=1.0, turns=({"a": 2.0},))))
    with TraceReader(tmp_path) as reader:
        assert [r["turn_parts"] for r in reader.rollouts()] == [None, [{"a": 2.0}]]
        assert reader.query("SELECT turn_parts[1]['a'] AS a FROM rollouts ORDER BY step") == [
            {"a": None},
            {"a": 2.0},
        ]


def test_a_column_of_another_kind_is_refused_by_name(tmp_path):
    other = pa.schema([("turn_parts", pa.int64())])
    with pa.OSFile(str(tmp_path / "000001.arrows"), "wb") as file, pa.ipc.new_stream(file, other) as stream:
        stream.write_batch(pa.record_batch([[3]], schema=other))
    with pytest.raises(UsageError, match=r"turn_parts.*int64") as refused:
        read_table(tmp_path, "rollouts")
    assert refused.value.where == str(tmp_path / "000001.arrows")


def test_tokens_are_spelled_once_each(tmp_path):
    asked: list[int] = []

    def spell(token: int) -> str:
        asked.append(token)
        return f"<{token}>"

    with Recorder(tmp_path / "trace", spell=spell) as recorder:
        recorder.rollout(make_rollout())
        recorder.rollout(make_rollout(1), pieces=list("abcdefg"))
        recorder.rollout(make_rollout(2, generated=5))
    with TraceReader(tmp_path) as reader:
        texts = ["".join(t["text"] for t in reader.tokens(f"g{g}.0.0")) for g in range(3)]
    assert texts == ["<0><1><2><3><4><5><6>", "abcdefg", "<0><1><2><3><4><5><6><7>"]
    assert asked == list(range(8))


def test_work_that_overlaps_a_flush_counts_on_both_sides(tmp_path):
    """Three pieces, each flushed at another time: 0-4, 2-6, 3-8; another stave's does not count."""
    clock = VirtualClock()

    async def play(recorder: Recorder) -> None:
        async def at(second: float) -> None:
            await clock.advance(second - clock.now())

        first = recorder.begin("decode")
        recorder.begin("train")
        await at(2)
        second = recorder.begin("decode", enabler=first)
        await at(3)
        third = recorder.begin("decode", enabler=first, enabler_type="resource")
        await at(4)
        recorder.end(first)
        recorder.flush()
        await at(6)
        recorder.end(second, ok=False)
        recorder.flush()
        await at(8)
        recorder.end(third)

    with Recorder(tmp_path / "trace", clock=clock, wall=0.0) as recorder:
        asyncio.run(play(recorder))
    with TraceReader(tmp_path) as reader:
        spans = reader.query("SELECT * FROM spans ORDER BY span_id")
    assert [s["concurrency"] for s in spans] == pytest.approx([7 / 4, 9 / 4, 9 / 5])
    assert [s["ok"] for s in spans] == [True, False, True]
    assert [s["t_request"] for s in spans] == [0, 2, 3], (
        "an enabler that still runs has not let anything start"
    )


def test_two_recorders_never_share_a_file(tmp_path):
    with Recorder(tmp_path / "trace") as one, Recorder(tmp_path / "trace") as other:
        ids = {add_span(one, "train", 0, 1).span_id, add_span(other, "sync", 0, 1).span_id}
    assert len(ids) == 2
    assert sorted(read_table(tmp_path / "trace" / "spans", "spans")["stave"].to_pylist()) == ["sync", "train"]


def test_a_trace_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "trace").write_text("a file where the folder should be")
    with pytest.raises(InfraFault, match="trace"):
        Recorder(tmp_path / "trace")


def test_pieces_must_match_the_tokens(tmp_path):
    with Recorder(tmp_path / "trace") as recorder, pytest.raises(ValueError, match="2 pieces"):
        recorder.rollout(make_rollout(), pieces=["a", "b"])


# ------------------------------------------------------------------------------------------------- reading


@pytest.fixture
def run_dir(tmp_path) -> Path:
    with Recorder(tmp_path / "trace") as recorder:
        for group in (10, 9, 2):
            for member in (1, 0):
                recorder.rollout(make_rollout(group, member, outcome=Outcome(score=group / 10)))
    return tmp_path


def test_rollouts_come_in_order_of_group_number(run_dir):
    with TraceReader(run_dir) as reader:
        ids = [r["rollout_id"] for r in reader.rollouts()]
    assert ids == ["g2.0.0", "g2.1.0", "g9.0.0", "g9.1.0", "g10.0.0", "g10.1.0"]


@pytest.mark.parametrize(
    ("where", "n"),
    [
        ("score > 0.5", 4),
        ("reward > 0.5 and turns == 1", 4),
        ("score > 5 -- none", 0),
        ("reply = '2'", 6),
        (None, 6),
    ],
)
def test_where_is_sql(run_dir, where, n):
    with TraceReader(run_dir) as reader:
        assert reader.count(where) == len(reader.rollouts(where)) == n
        assert len(reader.rollouts(where, limit=2)) == min(n, 2)


def test_wrong_sql_is_a_usage_error_that_offers_the_column(run_dir):
    with TraceReader(run_dir) as reader:
        with pytest.raises(UsageError, match="score"):
            reader.rollouts("scor > 1")
        with pytest.raises(UsageError):
            reader.rollouts("score >")


def test_sql_cannot_reach_other_files(run_dir):
    with TraceReader(run_dir) as reader:
        for sql in (f"COPY rollouts TO '{run_dir}/x.csv'", "SELECT * FROM read_text('/etc/passwd')"):
            with pytest.raises(UsageError):
                reader.query(sql)
    assert not (run_dir / "x.csv").exists()


def test_ids_are_data_not_sql(run_dir):
    with TraceReader(run_dir) as reader:
        assert reader.tokens("x' OR '1'='1") == []


def test_a_run_without_a_trace_is_empty_and_no_run_is_an_error(tmp_path):
    with TraceReader(tmp_path) as reader:
        assert reader.rollouts() == [] and reader.query("SELECT * FROM spans") == []
    with pytest.raises(UsageError):
        TraceReader(tmp_path / "absent")
