"""A stream cut anywhere goes on at its cursor as if it had not been cut, or says why it cannot."""

import itertools
import json
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import croze.env.parquet as parquet_module
from croze.env.tasks import Cursor, TaskSource, TaskStream, tasks
from croze.errors import TasksError

KINDS = ["list", "jsonl", "parquet", "hub", "endless", "ending", "constant"]


def table(n: int) -> list[dict]:
    """``n`` rows, a third of them doubles of another."""
    return [{"prompt": f"question {i - i % 3 // 2}", "answer": i - i % 3 // 2} for i in range(n)]


def take(stream: TaskStream, n: int) -> list:
    return list(itertools.islice(stream, n))


class HubTable(list):
    """What ``datasets.load_dataset`` returns, as far as croze uses it."""

    info: Any = None


class Sources:
    """Every kind of source over the same rows, in files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self, kind: str, n: int) -> TaskSource:
        rows = table(n)
        if kind == "list":
            return tasks(rows)
        if kind == "jsonl":
            path = self._folder / f"{n}.jsonl"
            path.write_text("\n\n".join(map(json.dumps, rows)))
            return tasks(path)
        if kind == "parquet":
            path = self._folder / f"{n}.parquet"
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)
            return tasks(path)
        if kind == "hub":
            return tasks(f"hf:croze/{n}")
        return tasks({"endless": endless, "ending": ending(n), "constant": constant(n)}[kind])


def endless(seed: int):
    rng = random.Random(seed)
    while True:
        yield {"prompt": f"{rng.randrange(40)}"}


def ending(n: int):
    def problems(seed: int):
        rng = random.Random(seed)
        for _ in range(rng.randint(1, n)):
            yield {"prompt": f"{rng.randrange(40)}"}

    return problems


def constant(n: int):
    def same(seed: int):
        yield from table(n)

    return same


def fake_datasets(commits: dict | None = None) -> ModuleType:
    """A module in the place of ``datasets``, which is no dependency of the tests: NAME is the number of rows."""
    module = ModuleType("datasets")

    def load_dataset(path, config, split):
        rows = HubTable(table(int(path.split("/")[1])))
        rows.info = SimpleNamespace(download_checksums=commits)
        return rows

    vars(module)["load_dataset"] = load_dataset
    return module


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "datasets", fake_datasets())
        patch.setattr(parquet_module, "WINDOW_BYTES", 300)
        yield Sources(tmp_path_factory.mktemp("sources"))


def through_json(cursor: Cursor) -> Cursor:
    assert all(type(value) in (int, type(None)) for value in msgspec.to_builtins(cursor).values())
    return msgspec.convert(json.loads(msgspec.json.encode(cursor)), Cursor)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(4, 17),
    seed=st.integers(),
    held=st.integers(0, 2),
    cuts=st.lists(st.integers(0, 40), min_size=1, max_size=3),
)
def test_a_stream_goes_on_at_its_cursor(kind, n, seed, held, cuts, sources):
    source = sources.make(kind, n)
    without = source.holdout(held, seed)
    whole = take(source.stream(seed, without=without), sum(cuts) + 20)
    assert len({task.id for task in whole}) == len(whole)
    got, cursor = [], None
    for cut in [*cuts, 20]:
        stream = sources.make(kind, n).stream(seed, without=without, start=cursor)
        got += take(stream, cut)
        cursor = through_json(stream.cursor)
    assert got == whole


@pytest.mark.parametrize("kind", KINDS)
def test_every_place_of_three_epochs_is_a_place_to_go_on(kind, sources):
    source = sources.make(kind, 7)
    stream, cursors, whole = source.stream(5), [], []
    cursors.append(stream.cursor)
    for task in itertools.islice(stream, 30):
        whole.append(task)
        cursors.append(stream.cursor)
    assert len(set(map(str, cursors))) == len(cursors)
    for at, cursor in enumerate(cursors[:22]):
        assert take(source.stream(5, start=cursor), 8) == whole[at : at + 8]


def test_a_cursor_before_the_first_task_is_where_the_stream_began():
    source = tasks(table(5))
    assert source.stream(0).cursor == Cursor()
    stream = source.stream(0)
    next(stream)
    assert source.stream(0, start=stream.cursor).cursor == stream.cursor
    assert stream.cursor.epoch == 0 and stream.cursor.row == 1


def test_a_cursor_counts_the_rows_that_were_passed_over():
    source = tasks([{"prompt": f"{i}"} for i in range(10)])
    held = source.holdout(9, 0)
    stream = source.stream(0, without=held)
    (only,) = take(stream, 1)
    assert only.prompt not in [task.prompt for task in held]
    assert take(source.stream(0, without=held, start=stream.cursor), 2) == take(stream, 2)
    assert stream.cursor.epoch == 2


def test_what_becomes_of_a_task_that_was_given_does_not_matter():
    rows = [{"prompt": f"{i}", "board": [0, 0]} for i in range(5)]
    stream = tasks(json.loads(json.dumps(rows))).stream(0)
    next(stream).columns["board"].append("played")
    assert next(tasks(rows).stream(0, start=stream.cursor)) == next(stream)


def test_starting_reads_nothing_until_a_task_is_drawn():
    calls = []

    def problems(seed):
        calls.append(seed)
        yield {"prompt": "x"}

    stream = tasks(problems).stream(0, start=Cursor(epoch=3, row=1))
    assert calls == []
    assert next(stream).id == "4.0" and len(calls) == 2


@pytest.mark.parametrize("value", [{"epoch": -1}, {"row": -1}, {"row": 1.5}, {"row": "1"}, {"epoch": None}])
def test_a_cursor_of_nonsense_is_refused(value):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(value, Cursor)


# --------------------------------------------------------------------------------- a cursor that does not fit


def cursor_after(source: TaskSource, n: int, seed: int = 0) -> Cursor:
    stream = source.stream(seed)
    take(stream, n)
    return stream.cursor


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_is_noticed(kind, sources):
    source = sources.make(kind, 17)
    if kind == "constant":
        return  # whatever the seed, it gives the same: nothing to notice
    noticed = 0
    for seed in range(1, 9):
        try:
            next(source.stream(seed, start=cursor_after(source, 5)))
        except TasksError as error:
            noticed += "cursor" in error.message
    assert noticed >= 6


def test_a_table_that_became_shorter_is_noticed():
    cursor = cursor_after(tasks(table(9)), 9)
    with pytest.raises(TasksError, match="end before the cursor"):
        next(tasks(table(8)).stream(0, start=cursor))


def test_a_row_that_became_another_is_noticed():
    cursor = cursor_after(tasks(table(9)), 4)
    other = [row | {"answer": "new"} for row in table(9)]
    with pytest.raises(TasksError, match="row 4 of epoch 0") as caught:
        next(tasks(other).stream(0, start=cursor))
    assert caught.value.fix is not None and "seed" in caught.value.fix


def test_a_function_that_ends_sooner_the_second_time_is_noticed():
    lengths = iter([6, 3])

    def shrinking(seed):
        yield from table(next(lengths))

    source = tasks(shrinking)
    with pytest.raises(TasksError, match=r"end before the cursor \(row 5 of epoch 0\)") as caught:
        next(source.stream(0, start=cursor_after(source, 5)))
    assert caught.value.where == "shrinking()"


def test_a_function_that_does_not_keep_to_its_seed_is_noticed():
    rng = random.Random(0)

    def loose(seed):
        while True:
            yield {"prompt": f"{rng.random()}"}

    source = tasks(loose)
    with pytest.raises(TasksError, match="is not the one that the run was given"):
        next(source.stream(0, start=cursor_after(source, 3)))


def test_a_function_that_fails_while_it_is_brought_to_the_cursor_is_shown():
    calls = []

    def fragile(seed):
        calls.append(seed)
        for row in table(9):
            if len(calls) > 1 and row["answer"] == 3:
                raise KeyError("gone")
            yield row

    source = tasks(fragile)
    with pytest.raises(TasksError, match="KeyError: 'gone'"):
        next(source.stream(0, start=cursor_after(source, 6)))


def test_the_cursor_stays_where_it_was_when_a_row_is_bad():
    def broken(seed):
        yield from table(3)
        yield {"prmpt": "x"}

    stream = tasks(broken).stream(0)
    take(stream, 3)
    before = stream.cursor
    with pytest.raises(TasksError):
        next(stream)
    assert stream.cursor == before


# ------------------------------------------------------------------------------------------------ fingerprints


@pytest.mark.parametrize("kind", KINDS)
def test_a_fingerprint_is_the_same_twice_and_another_for_other_data(kind, sources):
    prints = [sources.make(kind, n).fingerprint() for n in (9, 9, 15)]
    assert len(prints[0]) == 32 and int(prints[0], 16) >= 0
    assert prints[0] == prints[1]
    if kind not in ("endless", "ending", "constant"):
        assert prints[0] != prints[2]


def test_a_functions_fingerprint_sees_its_first_rows_and_ends_an_endless_one():
    def other(seed):
        return iter(table(9)[1:])

    assert tasks(other).fingerprint() != tasks(constant(9)).fingerprint()
    assert tasks(endless).fingerprint() == tasks(endless).fingerprint()


def test_a_lists_fingerprint_looks_at_a_bounded_number_of_rows():
    looked = []

    class Long:
        def __len__(self):
            return 10**9

        def __getitem__(self, at):
            looked.append(at)
            return {"prompt": f"{at}"}

    tasks(Long()).fingerprint()
    assert len(set(looked)) == len(looked) == 1024
    assert looked[0] == 0 and looked[-1] == 10**9 - 1


def test_a_fingerprint_of_a_list_with_a_bad_row_names_it():
    with pytest.raises(TasksError, match="row 2 has no prompt"):
        tasks([*table(2), {"x": 1}]).fingerprint()


def test_a_hub_datasets_fingerprint_knows_the_commit(monkeypatch):
    prints = set()
    for commit in ("aaa", "aaa", "bbb"):
        files = {f"hf://datasets/croze/9@{commit}/train.parquet": {"num_bytes": 1}}
        monkeypatch.setitem(sys.modules, "datasets", fake_datasets(files))
        prints.add(tasks("hf:croze/9").fingerprint())
    assert len(prints) == 2
