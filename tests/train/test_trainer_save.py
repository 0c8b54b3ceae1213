"""Saved models load in transformers and peft and compute the same."""

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import small_models as small
from croze.config import Optim
from croze.errors import UsageError
from croze.models.architecture import from_config, read_architecture
from croze.models.layout import read_tensors
from croze.models.protocol import ModelFiles
from croze.models.weights import LoraSpec
from croze.train.save import save_model
from peer_models import hugging_face, teacher_forced

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def trained(name: str, tmp_path, lora: LoraSpec | None = None):
    """A model on disk, trained for a step; its files and the rig."""
    model = hugging_face(name)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "base" / "model.safetensors.index.json").write_text("{}")
    files = ModelFiles(name="base", path=tmp_path / "base", source="directory")
    rig = small.make_rig(
        from_config(model.config.to_dict()),
        tensors=model.state_dict(),
        lora=lora,
        optim=Optim(lr=1e-2),
        measured=False,
    )
    rig.trainer.forward_backward(small.batch(small.random_samples(97, [(9, (12, 5))])))
    rig.trainer.step(1)
    return files, rig


def assert_same(model, rig: small.Rig) -> None:
    samples = small.random_samples(97, [(9, (30,))], seed=5, holes=0.0)
    ids = np.concatenate([samples[0].prompt_P, samples[0].ids_S])
    found = rig.trainer.logprobs(samples)[0]
    np.testing.assert_allclose(found, teacher_forced(model.float().eval(), ids, 9), atol=1e-5)


@pytest.mark.parametrize("name", ["llama, grouped queries", "llama, untied", "qwen2", "qwen3, wide heads"])
def test_a_full_model_loads_in_transformers(name, tmp_path):
    files, rig = trained(name, tmp_path)
    folder = tmp_path / "out" / "model"
    save_model(rig.trainer.export(), files, folder, lora=rig.weights.lora)
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert (folder / "chat_template.jinja").exists()
    assert not (folder / "model.safetensors.index.json").exists()
    assert [p.name for p in folder.parent.iterdir()] == ["model"]
    assert_same(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), rig)
    again = small.make_rig(read_architecture(folder), tensors=dict(read_tensors(folder)), measured=False)
    samples = small.random_samples(97, [(9, (30,))], seed=5)
    np.testing.assert_array_equal(again.trainer.logprobs(samples)[0], rig.trainer.logprobs(samples)[0])


@pytest.mark.parametrize("targets", [small.ALL_LINEARS, ("v_proj", "down_proj")], ids=len)
def test_an_adapter_loads_in_peft(targets, tmp_path):
    files, rig = trained("qwen3", tmp_path, LoraSpec(rank=3, scale=2.0, targets=targets))
    folder = tmp_path / "adapter"
    save_model(rig.trainer.export(), files, folder, lora=rig.weights.lora)
    # the engine runs on the bf16 base that was published
    base = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.bfloat16).float()
    assert_same(PeftModel.from_pretrained(base, folder), rig)


def test_nothing_is_overwritten(tmp_path):
    files, rig = trained("llama, grouped queries", tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(UsageError, match="exists"):
        save_model(rig.trainer.export(), files, folder, lora=rig.weights.lora)
    assert not list(folder.iterdir())


def test_what_an_interrupted_save_left_is_no_obstacle(tmp_path):
    files, rig = trained("llama, grouped queries", tmp_path)
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "junk").write_text("x")
    save_model(rig.trainer.export(), files, tmp_path / "model", lora=rig.weights.lora)
    assert not (tmp_path / "model" / "junk").exists()
    assert not (tmp_path / ".model.partial").exists()
