"""The house holds its shape: imports point one way, files and functions are small, starting is cheap."""

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import croze

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "croze"
SCRIPTS = ("examples/*.py", "scripts/*.py", "bench/*.py")
MAX_LINES, MAX_FUNCTION, GOOD_FUNCTION = 400, 100, 60

LOW = {"types", "config", "errors", "clock", "trace", "wire", "run", "_verb", "_version", "plugins"}
SIBLINGS = {"env", "reward", "sandbox", "inference", "train", "sync"}
MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(LOW, LOW),
    "models": LOW,
    **{sibling: LOW | {"models"} for sibling in SIBLINGS},
    "reward": LOW | {"models", "sandbox"},
    "rollout": LOW | {"models"} | SIBLINGS,
    "loop": LOW | {"models", "rollout"} | SIBLINGS,
}
MAY_IMPORT["launch"] = MAY_IMPORT["loop"] | {"loop"}
MAY_IMPORT["plan"] = MAY_IMPORT["launch"] | {"launch"}
MAY_IMPORT["report"] = MAY_IMPORT["plan"] | {"plan"}
MAY_IMPORT["cli"] = MAY_IMPORT["report"] | {"report"}
MAY_IMPORT["__main__"] = {"cli"}
HEAVY = ("torch", "transformers", "ray", "rich", "pyarrow", "duckdb", "scipy")
STANDARD_FOLDERS = {
    Path(p) for p in ("/", "/tmp", "/home", "/opt", "/usr", "/src", "/app", "/srv", "/mnt", "/build")
}
"""Folders in which a clone may lie and which files may name all the same."""


def python_files(*patterns: str) -> list[Path]:
    return [p for pattern in patterns for p in sorted(ROOT.glob(pattern))]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in python_files("src/croze/**/*.py")}


def package(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(module: str, *, when_loaded: bool = False) -> Iterator[tuple[str, int]]:
    """Modules of croze that a module imports, with the line; ``when_loaded`` leaves out those in functions
    and those for type checkers."""
    tree = parsed(MODULES[module])
    skipped: set[int] = set()
    if when_loaded:
        for node in ast.walk(tree):
            lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if lazy or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
                skipped |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in MODULES else str(node.module) for name in names]
        else:
            continue
        for name in found:
            if name.split(".")[0] == "croze":
                yield name, node.lineno


def test_imports_point_one_way():
    wrong = []
    for module in MODULES:
        home = package(module)
        if home == "":
            continue
        assert home in MAY_IMPORT, f"{module}: say in MAY_IMPORT where the package {home!r} stands"
        for name, line in imports(module):
            target = package(name)
            allowed = target in MAY_IMPORT[home] | {home} or (target == "" and home == "cli")
            if not allowed:
                wrong.append(f"{MODULES[module].relative_to(ROOT)}:{line}: {home} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_trace_stands_lowest():
    allowed = {"types", "config", "errors", "clock", "trace"}
    wrong = [
        f"{m} imports {n}"
        for m in MODULES
        if package(m) == "trace"
        for n, _ in imports(m)
        if package(n) not in allowed
    ]
    assert not wrong


def test_no_import_cycles():
    edges = {m: {n for n, _ in imports(m, when_loaded=True) if n in MODULES and n != m} for m in MODULES}
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in sorted(edges[module]):
                visit(name, [*path, module])
            done.add(module)

    for module in MODULES:
        visit(module, [])


def test_files_and_functions_are_small(capsys):
    too_long, long = [], []
    for path in python_files("src/**/*.py", "tests/**/*.py", *SCRIPTS):
        text = path.read_text(encoding="utf-8")
        place = path.relative_to(ROOT)
        lines = sum(bool(line.strip()) for line in text.splitlines())
        if lines > MAX_LINES:
            too_long.append(f"{place}: {lines} lines, {MAX_LINES} allowed")
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                size = node.end_lineno - node.lineno + 1
                if size > MAX_FUNCTION:
                    too_long.append(
                        f"{place}:{node.lineno}: {node.name} has {size} lines, {MAX_FUNCTION} allowed"
                    )
                elif size > GOOD_FUNCTION:
                    long.append(f"{place}:{node.lineno}: {node.name} has {size} lines")
    with capsys.disabled():
        if long:
            print(f"\nfunctions of more than {GOOD_FUNCTION} lines:", *long, sep="\n  ")
    assert not too_long, "\n".join(too_long)


def test_inheritance_is_one_deep():
    bases: dict[str, list[str]] = defaultdict(list)
    for path in MODULES.values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                bases[node.name] += [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
    allowed = {"Protocol", "Struct", "ABC"}
    deep = []
    for name, parents in bases.items():
        grandparents = {g for parent in parents if parent in bases for g in bases[parent]} - allowed
        if grandparents and "CrozeError" not in ancestors(name, bases):
            deep.append(f"{name} -> {parents} -> {sorted(grandparents)}")
    assert not deep, "\n".join(deep)


def ancestors(name: str, bases: dict[str, list[str]]) -> set[str]:
    parents = set(bases.get(name, ()))
    return parents | {a for parent in parents if parent in bases for a in ancestors(parent, bases)}


@pytest.mark.parametrize(
    "program", ["import croze", "from croze.cli.main import main; main(['--help'])", "import croze.run"]
)
def test_nothing_heavy_is_imported(program):
    check = f"{program}\nimport sys\nprint('LOADED', *[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "LOADED"


@pytest.mark.parametrize("name", croze.__all__)
def test_every_public_name_is_there_and_explained(name):
    value = getattr(croze, name)
    assert value.__doc__, f"cz.{name} has no docstring"


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="tsaks"):
        _ = croze.tsaks


def test_no_tracked_file_names_a_path_of_one_machine():
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    here = {ROOT, ROOT.parent, Path.home(), Path(sys.prefix)} - STANDARD_FOLDERS
    folders = "|".join(re.escape(f"{folder}/") for folder in sorted(here))
    machine_path = re.compile(rf"(?<![\w.])(?:{folders}|/home/\w+/|/Users/\w+/|/root/)")
    wrong = []
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path == Path(__file__) or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for at, line in enumerate(text.splitlines(), 1):
            if machine_path.search(line):
                wrong.append(f"{name}:{at}: {line.strip():.100}")
    assert not wrong, "\n".join(wrong)


def test_nothing_is_left_for_later():
    later = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    wrong = [
        f"{path.relative_to(ROOT)}:{at}: {line.strip():.100}"
        for path in python_files("src/**/*.py", *SCRIPTS)
        for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if later.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_pickled():
    wrong = [
        f"{path.relative_to(ROOT)}"
        for path in MODULES.values()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
        & ({a.name for a in node.names} | {getattr(node, "module", None)})
    ]
    assert not wrong, "\n".join(wrong)
