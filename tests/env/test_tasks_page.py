"""The page on tasks: its examples run, one after the other, as a reader would type them."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "tasks.md"


def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
