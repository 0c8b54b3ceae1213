"""What the documentation shows is what there is."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_readme_shows_the_example_as_it_is() -> None:
    (shown,) = blocks(ROOT / "README.md", "python")
    example = (ROOT / "examples" / "calc.py").read_text()
    assert shown.strip() in example


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_in_the_docs_compiles(page: Path) -> None:
    for source in blocks(page, "python"):
        compile(source, str(page), "exec")


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "AGENTS.md"], ids=lambda p: p.name)
def test_files_named_in_the_docs_exist(page: Path) -> None:
    named = re.findall(r"`((?:docs|examples|bench|tests|src)/[\w./-]+)`", page.read_text())
    assert named
    for path in named:
        assert (ROOT / path).exists(), path


def test_keys_named_in_the_docs_exist() -> None:
    from croze.run import all_keys

    sections = {key.split(".")[0] for key in all_keys() if "." in key}
    for page in PAGES:
        for key in re.findall(r"\b([a-z]+\.[a-z_]+)=", page.read_text()):
            if key.split(".")[0] in sections:
                assert key in all_keys(), f"{page.name}: {key}"
