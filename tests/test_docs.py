"""What the documentation shows is what there is: every command parses, every block runs, in a few steps."""

import argparse
import glob
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from doc_pages import Block, blocks, commands, shrunk, told_names

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
RUN = [page for page in DOCS if page.parent.name in ("tutorials", "concepts")]
"""Pages whose commands and programs are run, one after the other."""
TESTED_ELSEWHERE = {"plugins.md", "tasks.md"}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_readme_shows_the_example_as_it_is() -> None:
    (shown,) = (b for b in blocks(ROOT / "README.md") if b.language == "python")
    assert shown.text.strip() in (ROOT / "examples" / "calc.py").read_text()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_in_the_docs_compiles(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, str(page), "exec")
            assert block.quoted is None or block.text.strip() in (ROOT / block.quoted).read_text()


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "AGENTS.md"], ids=lambda p: p.name)
def test_files_named_in_the_docs_exist(page: Path) -> None:
    named = re.findall(r"`((?:docs|examples|bench|tests|src)/[\w./-]+)`", page.read_text())
    assert named
    for path in named:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [p for p in DOCS if p.parent.name != "decisions" and p.name != "README.md"]
    assert [named(p) for p in pages if f"({p.relative_to(ROOT / 'docs')})" not in index] == []


def test_every_example_has_a_tutorial() -> None:
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert {path.stem for path in (ROOT / "docs" / "tutorials").glob("*.md")} == examples


@pytest.mark.parametrize("page", [p for p in RUN if p.parent.name == "concepts"], ids=named)
def test_a_concept_is_one_page(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 66


def test_keys_named_in_the_docs_exist() -> None:
    from croze.run import all_keys

    sections = {key.split(".")[0] for key in all_keys() if "." in key}
    for page in PAGES:
        for key in re.findall(r"\b([a-z]+\.[a-z_]+)=", page.read_text()):
            if key.split(".")[0] in sections:
                assert key in all_keys(), f"{page.name}: {key}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_in_the_docs_parse(page: Path) -> None:
    from croze.cli.main import VERBS, parser_of
    from croze.run import all_keys

    for words in commands(page):
        assert words[0] in VERBS, words
        arguments = parser_of(words[0])[1].parse_intermixed_args([w for w in words[1:] if w != "--json"])
        assert isinstance(arguments, argparse.Namespace)
        for word in getattr(arguments, "words", None) or ():
            assert word.partition("=")[0] in [*all_keys(), "key"], words


def test_the_reference_is_what_the_code_says() -> None:
    """Keys and verbs: pages made by a script."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_reference.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, (
        f"{done.stdout}{done.stderr}\nmake them again: python scripts/make_reference.py"
    )


@pytest.mark.parametrize(
    "page", [p for p in DOCS if p not in RUN and p.name not in TESTED_ELSEWHERE], ids=named
)
def test_programs_of_the_reference_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks(page):
        if block.language == "python" and block.quoted is None:
            exec(compile(block.text, str(page), "exec"), names)


@pytest.fixture(scope="session")
def small_chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of random weights with the tokenizer of the examples' model."""
    from croze.models.source import resolve
    from croze.plan.rehearsal import make_tiny

    return make_tiny(resolve("smollm2-135m-instruct"), tmp_path_factory.mktemp("model") / "small")


@pytest.mark.parametrize("page", RUN, ids=named)
def test_a_page_runs_from_its_top_to_its_end(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small_chat_model: Path,
) -> None:
    """Its commands end with 0 and tell the figures that the page shows; its programs run."""
    for example in (ROOT / "examples").glob("*.py"):
        (tmp_path / example.name).write_text(example.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names: dict = {"__name__": "page"}
    said = ""
    for block in blocks(page):
        if block.language == "sh":
            said += run_commands(block, small_chat_model, capsys)
        elif block.language == "text":
            assert told_names(block.text) <= told_names(said), (
                f"not told: {told_names(block.text) - told_names(said)}"
            )
        elif block.language == "python" and block.quoted is None:
            exec(compile(block.text, str(page), "exec"), names)


def run_commands(block: Block, model: Path, capsys: pytest.CaptureFixture[str]) -> str:
    from croze.cli.main import main

    capsys.readouterr()
    for line in block.text.splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program == "croze"
        words = [found for word in words for found in expanded(word)]
        assert main(shrunk(words, model)) == 0, f"{line}\n{capsys.readouterr().err}"
    return capsys.readouterr().out


def expanded(word: str) -> list[str]:
    """What a shell makes of a word with a star."""
    return sorted(glob.glob(word)) or [word] if "*" in word else [word]
