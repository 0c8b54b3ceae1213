"""Models that are not whole, tokenizers that lose something, and what model and machine do not bear."""

import json
from pathlib import Path

import numpy as np
import pytest
from plan_help import CONFIG, a_run, look, only, write_model
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from croze.config import Algo, EngineOptions, Lora, Optim, Sampling

CHAT = [{"role": "user", "content": "one and one?"}]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MORE = {"vocab_size": 300}


def model_finding(path: Path):
    return only(look(a_run(model=str(path)), "model"), "model")


# ------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("shards", [0, 3])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_whole_model_passes(tmp_path, family, shards):
    path = write_model(tmp_path / "m", shards=shards, model_type=family)
    found = model_finding(path)
    assert found.status == "ok" and family in found.message


def cut_off(path: Path) -> None:
    file = path / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def no_index(path: Path) -> None:
    (path / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda p: (p / "model-00002-of-00003.safetensors").unlink(), "model-00002-of-00003.safetensors"),
        (cut_off, "model-00002-of-00003.safetensors is damaged"),
        (no_index, "model.safetensors"),
        (lambda p: (p / "config.json").unlink(), "config.json"),
        (lambda p: (p / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda p: (p / "croze_tokenizer.json").unlink(), "no tokenizer files"),
    ],
)
def test_what_is_wrong_with_the_files_is_named(tmp_path, damage, said):
    path = write_model(tmp_path / "m", shards=3)
    damage(path)
    found = model_finding(path)
    assert (found.status, found.kind) == ("fail", "model")
    assert said in found.message and str(tmp_path) in (found.where or "") and found.fix


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "missing, e.g. 'model.layers.1.mlp.up_proj.weight'"),
        ({"model.norm.weight": (31,)}, "'model.norm.weight' has shape (31,)"),
        ({"model.layers.0.mlp.experts.0.weight": (4, 4)}, "unexpected tensor"),
    ],
)
def test_tensors_are_held_to_the_architecture(tmp_path, tensors, said):
    found = model_finding(write_model(tmp_path / "m", tensors=tensors))
    assert (found.status, found.kind) == ("fail", "model") and said in found.message


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_quantised_tensors_are_refused(tmp_path, dtype):
    found = model_finding(write_model(tmp_path / "m", dtype=dtype))
    assert (found.status, found.kind) == ("fail", "model")


def test_a_head_beside_tied_embeddings_is_no_fault(tmp_path):
    assert model_finding(write_model(tmp_path / "m", tensors={"lm_head.weight": (128, 32)})).status == "ok"


def test_an_unsupported_architecture_fails(tmp_path):
    path = write_model(tmp_path / "m")
    (path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "mamba"}))
    found = model_finding(path)
    assert (found.status, found.kind) == ("fail", "model.unsupported") and "mamba" in found.message


@pytest.mark.parametrize("name", ["tiny-calk", "./nowhere", "no-such/model-at-all"])
def test_a_model_that_is_not_there_fails_and_what_needs_it_is_not_checked(name, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    findings = look(a_run(model=name), "model", "tokenizer", "prompts", "shape", "disk")
    assert only(findings, "model").kind == "model.not_found"
    assert {f.kind for f in findings if f.check in ("tokenizer", "prompts", "shape", "disk")} == {"skipped"}


# ------------------------------------------------------------------------------------------------- tokenizer


def write_chat_model(path: Path, *, template: str | None = TEMPLATE, bos: bool = False, **config) -> Path:
    write_model(path, **{**MORE, **config})
    (path / "croze_tokenizer.json").unlink()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*SPECIALS, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    if bos:
        pair = [("<|endoftext|>", 0)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=pair
        )
    tokenizer.save(str(path / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def tokenizer_findings(path: Path, **fields):
    run = a_run(model=str(path), tasks=[{"prompt": CHAT, "answer": "2"}] * 20, **fields)
    return [f for f in look(run, "tasks", "tokenizer") if f.check == "tokenizer"]


@pytest.mark.parametrize("bos", [False, True])
def test_a_sound_chat_template_passes(tmp_path, bos):
    (found,) = tokenizer_findings(write_chat_model(tmp_path / "m", bos=bos))
    assert found.status == "ok" and "<|im_end|>" in found.message and "5 conversations" in found.message


@pytest.mark.parametrize(
    ("template", "kind", "status"),
    [
        (None, "model", "fail"),
        (TEMPLATE.partition("{% if add")[0], "tokenizer.generation_prompt", "fail"),
        (TEMPLATE.replace("<|im_start|>{{", "<|im_start|><|im_start|>{{"), "tokenizer.twice", "fail"),
        (TEMPLATE.replace("{{ m.content }}", "{{ m.content[:8] }}"), "tokenizer.template", "fail"),
        (
            TEMPLATE.replace("%}<|im_start|>{{", "%}" + NO_SYSTEM + "<|im_start|>{{"),
            "tokenizer.roles",
            "warn",
        ),
        (TEMPLATE.replace("assistant\n", "assistant\n<think>"), "tokenizer.history", "warn"),
    ],
)
def test_what_is_wrong_with_a_chat_template_is_named(tmp_path, template, kind, status):
    findings = tokenizer_findings(write_chat_model(tmp_path / "m", template=template))
    assert (kind, status) in {(f.kind, f.status) for f in findings}, findings


def test_a_tokenizer_of_another_model_is_noticed(tmp_path):
    findings = tokenizer_findings(write_chat_model(tmp_path / "m", vocab_size=64))
    assert findings[0].kind == "tokenizer.vocab"
    findings = tokenizer_findings(write_chat_model(tmp_path / "n", vocab_size=2))
    assert findings[0].status == "fail" and "the model knows 2" in findings[0].message


def test_a_tokenizer_that_cannot_be_loaded_fails(tmp_path):
    path = write_chat_model(tmp_path / "m")
    (path / "tokenizer.json").write_text("{}")
    (found,) = tokenizer_findings(path)
    assert (found.status, found.kind) == ("fail", "model")


@pytest.mark.parametrize(("stop", "kind"), [("<|im_end|>", "tokenizer.stop"), ("done", "tokenizer")])
def test_a_stop_string_that_no_reply_can_hold_is_noticed(tmp_path, stop, kind):
    (found,) = tokenizer_findings(write_chat_model(tmp_path / "m"), sampling=Sampling(stop=(stop,)))
    assert found.kind == kind


def test_a_stop_string_outside_the_alphabet_is_noticed():
    found = only(look(a_run(sampling=Sampling(stop=("§",))), "tasks", "tokenizer"), "tokenizer")
    assert (found.status, found.kind) == ("warn", "tokenizer.stop")


# ------------------------------------------------------------------------------------------------- shape, memory, disk


def test_a_group_of_one_fails():
    found = only(look(a_run(group_size=1), "declaration"), "declaration")
    assert (found.status, found.kind, found.where) == ("fail", "config", "group_size") and found.fix
    alone = a_run(group_size=1, algo=Algo(name="reinforce++"))
    assert only(look(alone, "declaration"), "declaration").status == "ok"


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"optim": Optim(minibatches=9)}, "optim.minibatches"),
        ({"sampling": Sampling(temperature=0.0)}, "sampling.temperature"),
        ({"sampling": Sampling(top_p=0.9)}, "sampling.top_p"),
        ({"algo": Algo(name="grpoo")}, "algo.name"),
        ({"engine": EngineOptions(name="vlm")}, "engine.name"),
        ({"algo": Algo(importance="mask")}, "algo.importance"),
    ],
)
def test_options_that_do_not_fit_together_fail(fields, where):
    found = only(look(a_run(**fields), "declaration"), "declaration")
    assert (found.status, found.kind) == ("fail", "config") and where in (found.where or "")


def test_all_that_is_wrong_is_told_at_once():
    run = a_run(group_size=1, engine=EngineOptions(name="vlm"), reward=lambda reply: 1.0)
    assert len([f for f in look(run, "declaration") if f.status == "fail"]) == 3


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"sampling": Sampling(max_tokens=512)}, "shape.context"),
        ({"engine": EngineOptions(max_rows=4)}, "shape.rows"),
        ({"optim": Optim(minibatches=3)}, "shape.minibatches"),
    ],
)
def test_odd_shapes_are_a_warning(fields, kind):
    assert kind in {f.kind for f in look(a_run(**fields), "shape") if f.status == "warn"}


def test_a_rollout_that_kv_memory_cannot_hold_fails(tmp_path):
    model = write_model(tmp_path / "m", num_hidden_layers=80, max_position_embeddings=1 << 16)
    run = a_run(
        model=str(model), sampling=Sampling(max_tokens=1 << 15), engine=EngineOptions(kv_memory_mib=64)
    )
    found = look(run, "shape")[0]
    assert (found.status, found.kind, found.where) == ("fail", "config", "engine.kv_memory_mib")
    run = a_run(model=str(model), sampling=Sampling(max_tokens=2048), engine=EngineOptions(kv_memory_mib=64))
    assert "shape.kv" in {f.kind for f in look(run, "shape")}


def test_a_model_that_is_too_large_for_the_disk_fails(tmp_path):
    model = write_model(
        tmp_path / "m", hidden_size=16384, intermediate_size=65536, num_hidden_layers=120, num_attention_heads=128
    )  # fmt: skip
    fields = {"model": str(model), "dir": str(tmp_path / "run")}
    assert only(look(a_run(**fields), "disk"), "disk").kind == "disk"
    assert only(look(a_run(**fields, lora=Lora(rank=1)), "disk"), "disk").status == "ok"


def test_a_run_folder_that_cannot_be_fails(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "config.json").write_text("{}")
    found = only(look(a_run(dir=str(tmp_path / "used")), "disk"), "disk")
    assert (found.status, found.kind, found.where) == ("fail", "usage", "run.dir") and "resume" in (
        found.fix or ""
    )
    found = only(look(a_run(dir=str(tmp_path / "used" / "config.json" / "x")), "disk"), "disk")
    assert (found.status, found.where) == ("fail", "run.dir")


def test_values_are_told_with_their_source():
    run = a_run(steps=7).override({"optim.lr": "1e-3"})
    found = only(look(run, "values"), "values")
    assert "steps=7 (file)" in found.message and "optim.lr=0.001 (override)" in found.message
    assert "group_size" not in found.message


def test_more_threads_than_cores_are_a_warning():
    found = look(a_run(engine=EngineOptions(threads=1000)), "machine")[0]
    assert (found.status, found.kind) == ("warn", "machine.threads")


def test_no_weight_is_read(tmp_path):
    """A file of a terabyte of holes takes as long as one of a kilobyte."""
    path = write_model(tmp_path / "m", vocab_size=1 << 22, hidden_size=1 << 14)
    assert model_finding(path).status == "ok"
    save_file({"x": np.zeros(1, np.float32)}, path / "model.safetensors")
    assert model_finding(path).status == "fail"
