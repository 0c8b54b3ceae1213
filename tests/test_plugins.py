"""Parts by name: a package of others is found, used in a run, and held to what it promises."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import croze
from croze import plugins
from croze.config import Algo, Sampling
from croze.errors import ConfigError, PluginError, SandboxFault, SandboxUnavailable
from croze.sandbox.drivers import open_driver
from croze.sandbox.protocol import Driver
from croze.train.algorithms import build

ROOT = Path(__file__).parents[1]
SOURCE = Path(croze.__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "plugins.md"
TASK = """
import croze as cz

async def welcomed(reply: str, sandbox: cz.Sandbox) -> float:
    return 1.0 if await sandbox.read("welcome") == b"from the cellar" else 0.0

run = cz.Run(model="tiny-calc", tasks=[{"prompt": "add 2 and 3, plus 4="}] * 8, reward=welcomed, steps=1,
             group_size=2, groups_per_step=1, sampling=cz.Sampling(max_tokens=3),
             engine=cz.EngineOptions(threads=1, self_check=False))
"""


def install(folder: Path, name: str, module: str, points: dict[str, dict[str, str]]) -> None:
    """What installing a package leaves behind: its module and its metadata."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(module)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    sections = [
        f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in pairs.items()) for group, pairs in points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(sections))


def shown(language: str) -> str:
    (block,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return block


def croze_here(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "croze.cli.main", *words, "--json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def cellar(tmp_path) -> Path:
    """A folder with a task file, and the package of the documentation on its PYTHONPATH."""
    points = tomllib.loads(shown("toml"))["project"]["entry-points"]
    install(tmp_path / "site", "cellar", shown("python"), points)
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path


def test_the_documented_package_is_used_in_a_run(cellar):
    done = croze_here(cellar, "train", "task.py", "run.dir=out", "sandbox.driver=cellar", "algo.name=ranked")
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    (step,) = (e for e in events if e["event"] == "step")
    assert (step["reward_mean"], step["valid"]) == (1.0, 1.0)
    keys = json.loads((cellar / "out" / "config.json").read_text())["keys"]
    assert (keys["sandbox.driver"], keys["algo.name"]) == ("cellar", "ranked")


def test_a_wrong_name_is_told_before_anything_starts(cellar):
    began = time.monotonic()
    done = croze_here(cellar, "train", "task.py", "run.dir=out", "sandbox.driver=celar")
    error = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, error["kind"], error["where"]) == (2, "config", "sandbox.driver")
    assert "bubblewrap, cellar, unsafe" in error["message"] and "'cellar'" in error["fix"]
    assert not (cellar / "out").exists() and time.monotonic() - began < 20


ENGINE = """
from croze.inference.torch_engine import build
from croze.train import trainer

def engine(parts):
    print("an engine of ours", flush=True)
    return build(parts)

class Apart:
    # shares no memory with the engine
    def __init__(self, parts):
        import dataclasses
        from croze.models.weights import ModelWeights
        own = ModelWeights(parts.weights.arch, parts.weights.recipe)
        self._inner = trainer.build(dataclasses.replace(parts, weights=own))
        print("a trainer of ours", flush=True)

    def __getattr__(self, name):
        return getattr(self._inner, name)
"""


def test_an_engine_and_a_trainer_of_others_give_the_same_run(cellar):
    install(
        cellar / "site",
        "works",
        ENGINE,
        {"croze.inference": {"works": "works:engine"}, "croze.train": {"works": "works:Apart"}},
    )
    ids = []
    for words in ((), ("engine.name=works", "optim.trainer=works")):
        done = croze_here(
            cellar, "train", "task.py", f"run.dir=out{len(words)}", "sandbox.driver=cellar", "steps=2", *words
        )
        assert done.returncode == 0, done.stdout + done.stderr
        ids.append(json.loads(done.stdout.splitlines()[-1])["weights_id"])
        assert ("an engine of ours" in done.stderr) == ("a trainer of ours" in done.stderr) == bool(words)
    assert ids[0] == ids[1]


BROKEN = """
raise_at_import = __name__ == "bursts" and 1 / 0

class Hollow:
    name = tier = "local"

def angry():
    raise RuntimeError("no cellar here")

class Claims:
    name, tier, missing = "claims", "fortress", ()
    async def create(self, **_): ...
    async def close(self): ...

class Bare(Claims):
    name, tier = "bare", "unsafe"

class Falls(Claims):
    name, tier = "falls", "local"
    async def create(self, **_): raise RuntimeError("the floor gave way")
"""


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Installs packages for this process."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def put(name: str, **drivers: str) -> None:
        install(tmp_path / "site", name, BROKEN, {"croze.sandbox": drivers})

    return put


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("nowhere:Driver", "ModuleNotFoundError"),
        ("bursts:Hollow", "ZeroDivisionError"),
        ("vaults:Nothing", "AttributeError"),
        ("vaults:angry", "no cellar here"),
        ("vaults:Hollow", "no close, create, missing"),
        ("vaults:raise_at_import", "not callable"),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_named_with_its_package(value, why, shelf):
    shelf("bursts" if value.startswith("bursts") else "vaults", vault=value)
    with pytest.raises(PluginError, match=why) as caught:
        plugins.make("croze.sandbox", "vault", keeps=Driver)
    assert "package" in caught.value.message and caught.value.where == "sandbox.driver" and caught.value.fix


def test_a_name_that_two_packages_claim_is_refused(shelf):
    shelf("one", vault="one:Hollow", bubblewrap="one:Hollow")
    shelf("two", vault="two:Hollow")
    with pytest.raises(PluginError, match="one, two"):
        plugins.check("croze.sandbox", "vault")
    with pytest.raises(PluginError, match="croze, one"):
        plugins.check("croze.sandbox", "bubblewrap")


def test_drivers_of_others_fail_closed(shelf):
    shelf("vaults", claims="vaults:Claims", bare="vaults:Bare", falls="vaults:Falls", auto="vaults:Bare")
    with pytest.raises(PluginError, match="fortress"):
        asyncio.run(open_driver("claims", allow_unsafe=True))
    with pytest.raises(SandboxUnavailable, match="bare driver does not isolate"):
        asyncio.run(open_driver("bare"))
    with pytest.raises(SandboxFault, match="the floor gave way"):
        asyncio.run(open_driver("falls"))
    with pytest.raises(ConfigError, match="wants one of"):
        asyncio.run(open_driver("nothing"))
    with pytest.raises(ConfigError):
        plugins.check("croze.sandbox", "auto")
    assert "auto" not in plugins.names("croze.sandbox")


def test_an_unknown_algorithm_has_a_nearest_one():
    with pytest.raises(ConfigError, match="cispo, grpo, gspo, reinforce\\+\\+, rloo") as caught:
        build(Algo(name="gropo"), Sampling())
    assert caught.value.where == "algo.name" and "'grpo'" in (caught.value.fix or "")


def test_all_that_is_registered_can_be_loaded():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points.keys() == plugins.KEYS.keys()
    for group, named in points.items():
        for name in named:
            assert callable(plugins._find(group, name).load())
    page = PAGE.read_text()
    for group, key in plugins.KEYS.items():
        assert f"| `{group}` | `{key}` | " + ", ".join(f"`{n}`" for n in points[group]) in page


def bare_python(home: Path, program: str) -> subprocess.CompletedProcess[str]:
    """A Python that sees the modules of ``home`` and the standard library, and nothing that is installed."""
    return subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={**os.environ, "PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_source_tree_knows_its_own_without_metadata():
    done = bare_python(SOURCE, "from croze import plugins; print(*plugins.names('croze.sandbox'))")
    assert done.stdout.split() == ["bubblewrap", "unsafe"], done.stderr


def test_modules_alone_say_what_to_do(tmp_path):
    copy = tmp_path / "src" / "croze"
    copy.mkdir(parents=True)
    for module in (SOURCE / "croze").glob("*.py"):
        (copy / module.name).write_text(module.read_text())
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    done = bare_python(copy.parent, "from croze import plugins; plugins.check('croze.sandbox', 'unsafe')")
    assert "PluginError" in done.stderr and "pip install" in done.stderr


def test_nothing_is_looked_up_before_it_is_wanted():
    loaded = "import croze, croze.run, croze.plugins, sys; print('importlib.metadata' in sys.modules)"
    done = bare_python(SOURCE, loaded)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("a memory of something"), False),
    ],
)
def test_memory_that_is_wanting_is_no_fault_of_a_plugin(error: Exception, is_memory: bool) -> None:
    assert plugins._out_of_memory(error) is is_memory
