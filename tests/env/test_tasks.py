"""Task sources as a hostile user would write them: every mistake is named with its row and a fix."""

import itertools
import json
import random
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from croze.env.feeds import derive_seed
from croze.env.row import content
from croze.env.tasks import TaskSource, as_tasks, tasks
from croze.errors import TasksError


def rows(n: int) -> list[dict]:
    return [{"prompt": f"question {i}", "answer": i} for i in range(n)]


def problems(seed: int):
    rng = random.Random(seed)
    while True:
        a, b = rng.randrange(50), rng.randrange(50)
        yield {"prompt": f"{a}+{b}", "answer": str(a + b)}


def take(source: TaskSource, n: int, seed: int = 0, **options) -> list:
    return list(itertools.islice(source.stream(seed, **options), n))


def write_jsonl(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------------- sources


def test_a_function_is_called_with_seeds_and_streams_without_end():
    a, b = take(tasks(problems), 40), take(tasks(problems), 40)
    assert a == b
    assert a != take(tasks(problems), 40, seed=1)
    assert [t.id for t in a[:2]] == ["0.0", "0.1"]
    assert a[0].columns.keys() == {"answer"}
    assert tasks(problems).columns == ("answer",)


def test_a_generator_that_ends_is_called_again_with_another_seed():
    seeds = []

    def three(seed):
        seeds.append(seed)
        for i in range(3):
            yield {"prompt": f"{seed}/{i}"}

    got = take(tasks(three), 9)
    assert len({t.prompt for t in got}) == 9
    assert len({t.id for t in got}) == 9
    assert len(set(seeds)) == 3


@given(seed=st.integers(), epochs=st.lists(st.integers(0, 10**6), min_size=2, max_size=2))
def test_training_and_holdout_seeds_never_meet(seed, epochs):
    train, held = derive_seed(seed, "train", epochs[0]), derive_seed(seed, "holdout", epochs[1])
    assert train != held
    assert 0 <= train < 2**31 and 0 <= held < 2**31


@pytest.mark.parametrize("kind", ["list", "jsonl", "parquet"])
def test_a_finite_source_gives_every_row_once_an_epoch_in_a_new_order(kind, tmp_path):
    data = rows(23)
    if kind == "list":
        source = tasks(data)
    elif kind == "jsonl":
        source = tasks(write_jsonl(tmp_path / "t.jsonl", [json.dumps(r) for r in data]))
    else:
        pq.write_table(pa.Table.from_pylist(data), tmp_path / "t.parquet", row_group_size=5)
        source = tasks(str(tmp_path / "t.parquet"))
    got = take(source, 69)
    epochs = [got[:23], got[23:46], got[46:]]
    for epoch in epochs:
        assert sorted(t.columns["answer"] for t in epoch) == list(range(23))
    assert [t.prompt for t in epochs[0]] != [t.prompt for t in epochs[1]]
    assert len({t.id for t in got}) == 69
    assert got == take(source, 69)
    assert all(t.id.split(".")[1] == str(t.columns["answer"]) for t in got)


def test_any_table_with_a_length_and_subscripts_is_a_source():
    class Table:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"question": f"q{index}", "answer": index}

    got = take(tasks(Table(), prompt="{question}?"), 4)
    assert sorted(t.prompt for t in got) == ["q0?", "q1?", "q2?", "q3?"]
    assert got[0].columns.keys() == {"question", "answer"}


def test_declaring_reads_nothing(tmp_path):
    tasks(tmp_path / "absent.jsonl")
    tasks("hf:nobody/nothing")
    tasks(lambda seed: 1 / 0)


def test_as_tasks_takes_all_that_tasks_takes(tmp_path):
    source = tasks(rows(2))
    assert as_tasks(source) is source
    assert take(as_tasks(rows(2)), 2) == take(source, 2)
    assert isinstance(as_tasks(problems), TaskSource)
    path = write_jsonl(tmp_path / "t.jsonl", ['{"prompt": "x"}'])
    assert take(as_tasks(str(path)), 1)[0].prompt == "x"


# ------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_may_be_chat_messages():
    chat = [{"role": "system", "content": "calc"}, {"role": "user", "content": "1+1"}]
    assert take(tasks([{"prompt": chat}]), 1)[0].prompt == chat


def test_a_template_builds_the_prompt_from_columns():
    source = tasks([{"q": "2+2", "meta": {"level": 3}}], prompt="{q} at {meta[level]}, in \\boxed{{}}")
    task = take(source, 1)[0]
    assert task.prompt == "2+2 at 3, in \\boxed{}"
    assert task.columns == {"q": "2+2", "meta": {"level": 3}}


def test_a_template_that_names_no_column_of_the_row_offers_the_nearest():
    with pytest.raises(TasksError) as caught:
        take(tasks([{"question": "x"}], prompt="{qestion}"), 1)
    assert "did you mean 'question'?" in str(caught.value)
    assert "row 0" in str(caught.value)


@pytest.mark.parametrize("template", ["{", "{}", "{0}", "}", "{a b}", 7])
def test_a_broken_template_is_refused_when_declared(template):
    with pytest.raises(TasksError):
        tasks(rows(1), prompt=template)


# ------------------------------------------------------------------------------------------------- bad rows

BAD = {
    "not a dict": ("hello", "not a dict"),
    "no prompt": ({"promt": "x"}, "call the column 'promt' 'prompt'"),
    "no columns": ({}, "no prompt"),
    "number": ({"prompt": 3}, "an int"),
    "nothing": ({"prompt": None}, "nothing"),
    "empty": ({"prompt": ""}, "empty"),
    "no messages": ({"prompt": []}, "empty"),
    "message without role": ({"prompt": [{"content": "x"}]}, "message 0"),
    "message of text": ({"prompt": ["x"]}, "message 0"),
    "content of a number": ({"prompt": [{"role": "user", "content": 3}]}, "an int"),
    "half a surrogate": ({"prompt": "\ud800"}, "plain data"),
    "column of an object": ({"prompt": "x", "check": object()}, "'check'"),
    "column named by a number": ({"prompt": "x", 3: 4}, "named 3"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named(case):
    bad, words = BAD[case]
    with pytest.raises(TasksError) as caught:
        take(tasks([{"prompt": "good"}, bad]), 2)
    assert "row 1" in caught.value.message
    assert words in str(caught.value)


def test_a_column_that_contains_itself_is_named():
    loop: dict = {}
    loop["loop"] = loop
    with pytest.raises(TasksError, match="'x'"):
        take(tasks([{"prompt": "p", "x": loop}]), 1)


@pytest.mark.parametrize("source", [[], lambda seed: [], lambda seed: iter(())])
def test_a_source_without_rows_is_an_error(source):
    for use in (lambda s: take(s, 1), lambda s: s.holdout(1, 0), lambda s: s.columns):
        with pytest.raises(TasksError):
            use(tasks(source))


def test_a_generator_already_started_is_refused_with_what_to_write():
    with pytest.raises(TasksError, match=r"cz\.tasks\(problems\)"):
        tasks(problems(0))


@pytest.mark.parametrize(
    "source", [3, None, {"prompt": "x"}, {1, 2}, "data.json", "data", "hf:x", "hf:a/b/c/d"]
)
def test_what_cannot_be_a_source_is_refused(source):
    with pytest.raises(TasksError):
        tasks(source)


@pytest.mark.parametrize(
    "function", [list, lambda seed: None, lambda seed: {"prompt": "x"}, lambda seed: "abc"]
)
def test_a_function_of_the_wrong_shape_is_named(function):
    with pytest.raises(TasksError) as caught:
        take(tasks(function), 1)
    assert function.__name__ in str(caught.value)


def test_an_async_generator_is_refused():
    async def later(seed):
        yield {"prompt": "x"}

    with pytest.raises(TasksError, match="async_generator"):
        take(tasks(later), 1)


def test_the_users_exception_is_shown_with_its_line():
    def broken(seed):
        yield {"prompt": "x"}
        raise KeyError("gone")

    stream = tasks(broken).stream(0)
    next(stream)
    with pytest.raises(TasksError) as caught:
        next(stream)
    assert "KeyError: 'gone'" in caught.value.message and "row 1" in caught.value.message
    assert caught.value.where is not None and "test_tasks.py:" in caught.value.where


def test_a_table_that_is_not_read_by_row_number_is_named():
    class Frame:
        def __len__(self):
            return 2

        def __getitem__(self, name: str):
            raise KeyError(name)

    with pytest.raises(TasksError, match="Frame"):
        take(tasks(Frame()), 1)


# ------------------------------------------------------------------------------------------------- held out


@pytest.mark.parametrize("source", [tasks(rows(50)), tasks(problems)], ids=["list", "function"])
def test_held_out_tasks_never_appear_in_the_stream(source):
    held = source.holdout(20, seed=3)
    assert len({content(t) for t in held}) == len({t.id for t in held}) == 20
    assert held == source.holdout(20, seed=3)
    assert held[:5] == source.holdout(5, seed=3)
    assert held != source.holdout(20, seed=4)
    seen = {str(t.prompt) for t in take(source, 3000, seed=3, without=held)}
    assert not seen & {str(t.prompt) for t in held}
    assert all(t.id.startswith("held.") for t in held)


def test_duplicates_of_a_held_out_row_are_kept_out_too():
    source = tasks(rows(10) * 3)
    held = source.holdout(4, seed=0)
    counts = Counter(t.prompt for t in take(source, 18, without=held))
    assert set(counts.values()) == {3} and len(counts) == 6


def test_a_function_that_ignores_its_seed_can_still_hold_out():
    def fixed(seed):
        yield from rows(10)

    source = tasks(fixed)
    held = source.holdout(3, seed=0)
    assert len({str(t.prompt) for t in [*held, *take(source, 40, without=held)]}) == 10


def test_holding_out_more_than_there_is_ends_with_an_error():
    def constant(seed):
        while True:
            yield {"prompt": "x"}

    for source, n in ((tasks(rows(5)), 6), (tasks(constant), 2), (tasks(lambda seed: [{"prompt": "x"}]), 2)):
        with pytest.raises(TasksError, match="held out"):
            source.holdout(n, 0)


def test_a_stream_with_everything_held_out_ends_with_an_error():
    def constant(seed):
        while True:
            yield {"prompt": "x"}

    for source, n in ((tasks(rows(5)), 5), (tasks(constant), 1)):
        with pytest.raises(TasksError, match="no tasks are left"):
            take(source, 1, without=source.holdout(n, 0))


# ------------------------------------------------------------------------------------------------- the hub


def test_without_the_package_datasets_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TasksError, match=r"croze\[data\]"):
        take(tasks("hf:openai/gsm8k/main", prompt="{question}"), 1)
