"""Wrong tasks: refused before anything is paid for where that can be; in mid-run with a place, and resumable."""

from pathlib import Path

import pytest

from bad_inputs import Wrong, croze, hold, task_file, train, yielding


def source(expression: str) -> str:
    return task_file(tasks=expression)


def function(head: str, body: str) -> str:
    return task_file(f"{head}:\n    {body}\n\n", tasks="problems")


NO_TEXT = """class E(Exception):
    def __str__(self): raise ValueError
raise E
yield
"""
FINE, LONG = "yield {'prompt': '1=', 'answer': '1'}", "yield {'prompt': '1' * 5000, 'answer': '1'}"
NOT_CHAT = "yield {'prompt': [{'rol': 'user'}]}"

SOURCES = {
    "[]": ("no rows", "list", "at least one task"),
    "None": ("from nothing", "cz.tasks", "a function of a seed"),
    "3": ("from an int", "cz.tasks", "a function of a seed"),
    "{'prompt': 'x'}": ("one dict is one row", "cz.tasks", "cz.tasks([{...}])"),
    "{1, 2}": ("from a set", "cz.tasks", "a list of dicts"),
    "['a']": ("row 0 is a str", "row 0", "write {"),
    "[{}]": ("has no prompt", "row 0", 'add "prompt"'),
    "[{'promt': '1='}]": ("columns are promt", "row 0", "call the column 'promt' 'prompt'"),
    "'rows.jsonl'": ("no such file", "rows.jsonl", "check the path"),
    "'rows.csv'": ("'rows.csv'", "cz.tasks", ".jsonl or .parquet"),
    "cz.tasks(TASKS, prompt='{nope}')": ("no column 'nope'", "row 0", "column"),
    "(n for n in TASKS)": ("already called", "cz.tasks", "write cz.tasks("),
}
FUNCTIONS = {
    "returns nothing": (yielding("return None"), "returned nothing", "task.py:15", "def problems(seed)"),
    "returns text": (yielding("return 'rows'"), "returned a str", "task.py:15", "yield {...}"),
    "yields nothing": (yielding("if False:\n    yield"), "yields no rows", "task.py:15", "at least one"),
    "no seed": (function("def problems()", "yield {}"), "cannot be called", "task.py:15", "problems(seed)"),
    "async": (function("async def problems(seed)", "return []"), "a coroutine", "task.py:15", "def problems"),
    "raises": (yielding("1 / 0\nyield"), "row 0: ZeroDivisionError", "task.py:16", "islice(problems("),
    "raises what has no text": (yielding(NO_TEXT), "E: (its text", "task.py:18", "islice"),
    "exits": (yielding("sys.exit(3)\nyield"), "SystemExit: 3", "task.py:16", "islice"),
    "no dict": (yielding("yield None"), "row 0 is nothing", "task.py:15), row 0", "write {"),
    "empty prompt": (yielding("yield {'prompt': ''}"), "an empty prompt", "row 0", "leave the row out"),
    "prompt of no kind": (yielding("yield {'prompt': 3}"), "an int", "row 0", "a prompt is text"),
    "no chat message": (yielding(NOT_CHAT), "is not a chat message", "row 0", '"role": "user"'),
    "surrogate": (yielding("yield {'prompt': '\\ud800'}"), "not plain data", "row 0", "UTF-8"),
    "object": (yielding("yield {'prompt': '1=', 'answer': print}"), "column 'answer'", "row 0", "use text"),
    "first too long": (yielding(LONG), "5000 tokens, the model's context 512", ":15), row 0", "shorten"),
    "second too long": (yielding(f"{FINE}\n{LONG}"), "5000 tokens", "row 1", "shorten"),
    "no column": (yielding(f"{FINE}\nyield {{'prompt': '2='}}"), "no column 'answer'", "row 1", "every row"),
    "unknown letter": (yielding("yield {'prompt': 'é', 'answer': '1'}"), "no 'é'", "row 0", "ASCII"),
}
AT_ONCE = {**{name: (source(name), *said) for name, said in SOURCES.items()}, **FUNCTIONS}


@pytest.mark.parametrize("name", AT_ONCE)
def test_refused_before_the_first_token(tmp_path: Path, name: str):
    text, what, where, fix = AT_ONCE[name]
    answer = train(tmp_path, text)
    hold(answer, Wrong("tasks", what, where, fix))
    assert answer.left == [] and len(answer.events) == 1


def test_a_held_out_prompt_is_looked_at_too(tmp_path: Path):
    text = yielding(
        "for n in range(99):\n    yield {'prompt': '1' * (5000 if n == 1 else 5 + n), 'answer': '1'}"
    )
    for words in (("train", "task.py", "loop.eval_tasks=2"), ("eval", "task.py", "--tasks", "2")):
        (tmp_path / "task.py").write_text(text)
        answer = croze(tmp_path, *words)
        hold(answer, Wrong("tasks", "5000 tokens", "row 1 (task held.0.1)", "shorten"))
        assert answer.left == [] and len(answer.events) == 1


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (b"", Wrong("tasks", "no rows", "rows.jsonl", "at least one")),
        (b"\n \n", Wrong("tasks", "no rows", "rows.jsonl", "at least one")),
        (b"{'a': 1}\n", Wrong("tasks", "row 0 is not JSON", "rows.jsonl:1", "one JSON object a line")),
        (b'[\n{"prompt": "1="}]\n', Wrong("tasks", "not JSON", "rows.jsonl:1", "jq -c")),
        (b'\n"text"\n', Wrong("tasks", "row 0 is a str", "rows.jsonl:2", "write {")),
        (b"\x1f\x8b\x08garbage", Wrong("tasks", "compressed", "rows.jsonl", "gunzip")),
        (b"\xff\xfe{\x00", Wrong("tasks", "UTF-16", "rows.jsonl", "iconv")),
    ],
)
def test_files_of_rows(tmp_path: Path, data: bytes, wrong: Wrong):
    (tmp_path / "rows.jsonl").write_bytes(data)
    hold(train(tmp_path, source("'rows.jsonl'")), wrong)


ROW_5 = "for n in range(99):\n    if n == 5:\n        {}\n    yield {{'prompt': f'{{n}}=', 'answer': '1'}}"
IN_MID_RUN = {
    "raise KeyError('boom')": ("failed at row 5: KeyError: 'boom'", "task.py:18", "islice(problems("),
    "sys.exit(3)": ("failed at row 5: SystemExit: 3", "task.py:18", "islice"),
    "yield {'answer': '1'}": ("row 5 has no prompt", "row 5", 'add "prompt"'),
    "yield {'prompt': '1' * 600, 'answer': '1'}": ("600 tokens", "row 5 (task 0.5)", "shorten"),
    "yield {'prompt': '1='}": ("no column 'answer'", "row 5 (task 0.5)", "give every row"),
}


@pytest.mark.parametrize("fifth", IN_MID_RUN)
def test_in_mid_run_the_run_ends_with_the_place_and_how_to_go_on(tmp_path: Path, fifth: str):
    answer = train(tmp_path, yielding(ROW_5.format(fifth)), "run.dir=run", "steps=4")
    hold(answer, Wrong("tasks", *IN_MID_RUN[fifth]))
    assert [s["step"] for s in answer.steps()] == [1, 2]
    assert "croze resume run --changed (croze check " in answer.error["fix"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000002"]


def test_a_mended_file_goes_on_with_what_was_trained(tmp_path: Path):
    train(tmp_path, yielding(ROW_5.format("raise KeyError('boom')")), "run.dir=run", "steps=4")
    (tmp_path / "task.py").write_text(yielding(ROW_5.format("pass")))
    refused = croze(tmp_path, "resume", "run")
    hold(refused, Wrong("usage", "has changed", "task.py", "--changed"))
    resumed = croze(tmp_path, "resume", "run", "--changed")
    assert resumed.code == 0, resumed.events
    assert [s["step"] for s in resumed.steps()] == [3, 4] and resumed.events[-1]["event"] == "done"


def test_a_mended_table_goes_on_only_where_the_rows_so_far_are_the_same(tmp_path: Path):
    rows = [f'{{"prompt": "{n}=", "answer": "1"}}\n' for n in range(40)]
    long = '{"prompt": "' + "1" * 600 + '", "answer": "1"}\n'
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(rows))
    first = train(tmp_path, source("'rows.jsonl'"), "run.dir=ok", "steps=4")
    assert first.code == 0
    order = [row["task_id"] for row in croze(tmp_path, "trace", "ok").events]
    late = int(order[-1].partition(".")[2])  # a row of the last step
    file.write_text("".join([*rows[:late], long, *rows[late + 1 :]]))
    answer = train(tmp_path, source("'rows.jsonl'"), "run.dir=run", "steps=4")
    hold(answer, Wrong("tasks", "600 tokens", f"rows.jsonl:{late + 1} (task {order[-1]})", "shorten"))
    assert [s["step"] for s in answer.steps()] == [1, 2, 3]

    file.write_text("".join(rows[1:]))  # others, in another order
    refused = croze(tmp_path, "resume", "run", "--changed")
    hold(refused, Wrong("tasks", "before the cursor", "rows.jsonl", "the data and the seed"))
    file.write_text("".join(rows))
    assert croze(tmp_path, "resume", "run").error["kind"] == "usage", "said to be the same, and are not"
    assert croze(tmp_path, "resume", "run", "--changed").code == 0


def test_a_function_that_ends_is_called_again(tmp_path: Path):
    answer = train(
        tmp_path, yielding("for n in range(3):\n    yield {'prompt': f'{n}=', 'answer': '1'}"), "steps=4"
    )
    assert answer.code == 0 and len(answer.steps()) == 4
