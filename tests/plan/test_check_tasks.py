"""Tasks that would stop or spoil a run."""

import json

import plan_cases as cases
import pytest
from plan_help import a_run, look, only, write_model

import croze as cz
from croze.config import LoopOptions, Sampling
from croze.plan import checks_tasks

ROW = {"prompt": "1+1=", "answer": "2"}


def rows(count: int) -> list[dict]:
    return [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(count)]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ([], "there are no rows"),
        (cases.nothing, "it yields no rows"),
        ([{"promt": "1+1=", "answer": "2"}], "has no prompt"),
        ([ROW, {"prompt": "", "answer": "2"}], "has an empty prompt"),
        ([ROW, "1+1="], "is a str, not a dict"),
        ([ROW, {"prompt": "1", "answer": object()}], "not plain data"),
        (cases.breaks_off, "KeyError: 'the third column'"),
        (cases.one_after_a_thousand_is_bad, "row 1000 has no prompt"),
        (17, "cannot read tasks from an int"),
        ("no-such-file.jsonl", "there is no such file"),
    ],
)
def test_tasks_that_cannot_be_read_fail(source, said):
    findings = look(a_run(tasks=source), "tasks", "columns", "prompts")
    found = only(findings, "tasks")
    assert (found.status, found.kind) == ("fail", "tasks") and said in found.message
    assert {f.kind for f in findings if f.check in ("columns", "prompts")} == {"skipped"}


def test_what_a_task_function_raises_is_told_as_the_users_own():
    found = only(look(a_run(tasks=cases.breaks_off), "tasks"), "tasks")
    line = cases.breaks_off.__code__.co_firstlineno + 2
    assert found.where == f"{cases.__file__}:{line}" and "Traceback" not in found.message


def test_a_bad_row_of_a_file_is_found_by_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) for row in rows(3000)]
    lines[1499] = '{"prompt": 3}'
    path.write_text("\n".join(lines))
    found = only(look(a_run(tasks=cz.tasks(path)), "tasks"), "tasks")
    assert (found.status, found.where) == ("fail", f"{path}:1500")


def test_tasks_that_never_come_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(checks_tasks, "SLOWEST_S", 0.3)
    found = only(look(a_run(tasks=cases.never_comes), "tasks"), "tasks")
    assert found.status == "fail" and "0.3 s" in found.message


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (rows(3) * 20, "tasks.duplicates"),
        (cases.of_few_kinds, "tasks.duplicates"),
        (rows(5), "tasks.few"),
        (cases.another_time_another_task, "tasks.random"),
    ],
)
def test_odd_tasks_are_a_warning(source, kind):
    found = only(look(a_run(tasks=source), "tasks"), "tasks")
    assert (found.status, found.kind) == ("warn", kind) and found.fix


def test_sound_tasks_pass_and_their_columns_are_told():
    found = only(look(a_run(tasks=rows(100)), "tasks"), "tasks")
    assert found.status == "ok" and "100 rows" in found.message and "answer" in found.message


@pytest.mark.parametrize("held", [10, 20])
def test_too_few_tasks_to_hold_out_fail(held):
    found = only(look(a_run(tasks=rows(10), loop=LoopOptions(eval_tasks=held)), "tasks"), "tasks")
    assert (found.status, found.kind) == ("fail", "tasks") and "loop.eval_tasks" in (found.fix or "")


def test_held_out_tasks_of_their_own_leave_all_others():
    run = a_run(tasks=rows(10), eval_tasks=rows(4), loop=LoopOptions(eval_tasks=4))
    assert only(look(run, "tasks"), "tasks").status == "ok"


def test_a_prompt_longer_than_the_context_fails_with_its_task(tmp_path):
    model = write_model(tmp_path / "m")
    source = [*rows(500), {"prompt": "1+" * 150 + "1=", "answer": "151"}]
    found = only(look(a_run(model=str(model), tasks=source), "prompts"), "prompts")
    assert (found.status, found.kind) == ("fail", "tasks")
    assert "302 tokens" in found.message and "context 256" in found.message
    assert found.where == "row 500 (task 0.500)"


def test_a_prompt_that_leaves_little_room_is_a_warning(tmp_path):
    model = write_model(tmp_path / "m")
    source = [*rows(20), {"prompt": "1+" * 120 + "1=", "answer": "121"}]
    run = a_run(model=str(model), tasks=source, sampling=Sampling(max_tokens=64))
    found = only(look(run, "prompts"), "prompts")
    assert (found.status, found.kind) == ("warn", "tasks.long_prompt")
    assert found.fix is not None and "sampling.max_tokens to 14" in found.fix


def test_a_prompt_that_the_model_cannot_read_fails(tmp_path):
    source = [*rows(20), {"prompt": "één+1=", "answer": "2"}]
    found = only(look(a_run(tasks=source), "prompts"), "prompts")
    assert (found.status, found.kind) == ("fail", "tasks") and "'é'" in found.message
    assert found.where == "row 20 (task 0.20)"


def test_how_long_prompts_are_is_told():
    found = only(look(a_run(tasks=rows(100)), "prompts"), "prompts")
    assert found.status == "ok" and "min 4, median 5, p95 5, max 5" in found.message
