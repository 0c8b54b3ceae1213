"""The estimate against runs that really happen, and the dry run against real tensors."""

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_help import write_model

import croze as cz
from croze.config import Algo, Optim, Sampling
from croze.models.architecture import Architecture, read_architecture
from croze.models.numerics import Recipe
from croze.models.protocol import ModelFiles
from croze.models.weights import LoraSpec, ModelWeights
from croze.plan.bare_process import ASSUMED, BareProcess
from croze.plan.dry_run import Ledger, dry_run
from croze.plan.memory import MemoryEstimate, estimate
from croze.train import algorithms
from croze.train.trainer import TorchTrainer
from croze.types import Batch, WeightsId
from small_models import architecture, random_samples, random_tensors

MIB = 1 << 20
CHILD = textwrap.dedent(
    """
    import json, random, sys
    import croze as cz

    def problems(seed):
        rng = random.Random(seed)
        while True:
            yield {"prompt": "".join(rng.choices("abcdefgh", k=PROMPT))}

    def odd(rollout):
        return float(int(rollout.ids_T.sum()) % 7)

    PROMPT = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    if __name__ == "__main__":
        run = cz.Run(model=sys.argv[1], tasks=cz.tasks(problems), reward=odd, steps=2, dir=sys.argv[2])
        words = dict(word.split("=") for word in sys.argv[4:])
        cz.train(run.override(words), on_event=lambda event: print(json.dumps(event, default=str), flush=True))
    """
)
MODELS: dict[str, dict[str, Any]] = {
    "llama, 25M, tied": {
        "hidden_size": 448,
        "intermediate_size": 1344,
        "num_hidden_layers": 7,
        "num_attention_heads": 7,
        "num_key_value_heads": 7,
        "vocab_size": 14_000,
    },
    "qwen2, 33M, untied, grouped queries": {
        "model_type": "qwen2",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 16_000,
        "tie_word_embeddings": False,
    },
    "qwen3, 60M, under an adapter": {
        "model_type": "qwen3",
        "head_dim": 64,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "vocab_size": 32_000,
    },
}
SHAPES = {"few tokens": (24, 6, 2, 4), "many tokens": (48, 12, 2, 8)}
"""prompt, reply, groups, members"""


def declared(
    prompt: int, reply: int, groups: int, members: int, lora: bool = False, **words: object
) -> dict[str, str]:
    told = {
        "sampling.max_tokens": reply,
        "groups_per_step": groups,
        "group_size": members,
        "engine.threads": 1,
        "lora.rank": 8 if lora else 0,
        **words,
    }
    return {key: str(value) for key, value in told.items()}


def plain(reply: str) -> float:
    return float(len(reply))


async def boxed(reply: str, sandbox: cz.Sandbox) -> float:
    return float(len(reply))


def a_run(model: object = "unused", reward=plain, **words: object) -> cz.Run:
    run = cz.Run(model=str(model), tasks=[{"prompt": "unused"}], reward=reward)
    return run.override({key: str(value) for key, value in words.items()})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", MODELS)
def test_a_real_run_peaks_where_the_estimate_says(model, shape, tmp_path):
    prompt, reply, groups, members = SHAPES[shape]
    folder = write_model(tmp_path / "model", dtype="BF16", **MODELS[model])
    words = declared(
        prompt, reply, groups, members, lora="adapter" in model, **{"engine.self_check": "false"}
    )
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    argv = [sys.executable, script, folder, tmp_path / "run", prompt, *(f"{k}={v}" for k, v in words.items())]
    done = subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, timeout=300, env=one_thread()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    events = [json.loads(line) for line in done.stdout.splitlines()]
    measured = max(event["peak_mib"] for event in events if event["event"] == "step")
    found = estimate(a_run(folder, **words), read_architecture(folder), prompt_tokens=prompt)
    assert found.peak / MIB == pytest.approx(measured, rel=0.15), found


SMALL = {"sampling.max_tokens": 16, "groups_per_step": 2, "group_size": 4, "engine.threads": 1}


def of(arch: Architecture, **words: object) -> MemoryEstimate:
    return estimate(a_run(**{**SMALL, **words}), arch, prompt_tokens=40)


LORA = LoraSpec(rank=4, scale=2.0, targets=("q_proj", "v_proj", "gate_proj", "down_proj"))
VARIANTS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "an adapter": {"lora": LORA},
    "recomputed activations": {"optim": Optim(checkpointing=True)},
    "prompts not shared": {"optim": Optim(share_prompt=False)},
    "several micro-batches": {"optim": Optim(tokens_per_microbatch=90)},
    "with entropies": {"algo": Algo(entropy=0.1)},
    "with a reference": {"algo": Algo(kl=0.1)},
}


def trained(device: str, **options: Any) -> dict[str, int]:
    """Bytes live at the peak of two backward passes, by part; parts are guessed alike on every device."""
    lora, optim, algo = options.get("lora"), options.get("optim", Optim()), options.get("algo", Algo())
    arch = architecture(vocab=401, layers=3, qk_norm=True, tied=False, family="qwen3")
    samples = random_samples(arch.vocab, [(40, [24] * 4), (33, [20, 24, 9])], holes=0.0)
    given = {name: tensor.to(device) for name, tensor in random_tensors(arch).items()}
    with dry_run() if device == "meta" else Ledger("cpu") as ledger:
        trainer = TorchTrainer(
            ModelWeights(arch, Recipe(packed=False, device=device), lora),
            given.items(),
            algorithms.build(algo, Sampling()),
            optim,
            steps=2,
            published=torch.bfloat16,
            release=True,
        )
        trainer.publish(WeightsId("first"))
        if algo.kl:
            found = trainer.reference_logprobs(samples)
            samples = [msgspec.structs.replace(s, reference_S=r) for s, r in zip(samples, found, strict=True)]
        ledger.watch()
        for _ in range(2):
            trainer.forward_backward(Batch(step=1, samples=tuple(samples)))
        ledger.name("gradients", trainer.parameters.grads.values())
        return ledger.peak().parts


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_dry_run_counts_what_the_real_one_holds(variant):
    real, dry = trained("cpu", **VARIANTS[variant]), trained("meta", **VARIANTS[variant])
    assert dry == pytest.approx(real, rel=0.02)


@settings(deadline=None)  # the first operation imports much
@given(st.lists(st.tuples(st.sampled_from(["make", "view", "drop", "add"]), st.integers(1, 60)), max_size=40))
def test_the_ledger_knows_what_lives(steps):
    live: list[torch.Tensor] = []
    most = 0
    with dry_run() as ledger:
        for what, size in steps:
            if what == "make":
                live.append(torch.empty(size, 7))
            elif live and what == "view":
                live.append(live[size % len(live)].view(-1)[1:])
            elif live and what == "add":
                live[size % len(live)].add_(1)
            elif live:
                live.pop(size % len(live))
            storages = (tensor.untyped_storage() for tensor in live)
            most = max(most, sum({s._cdata: s.nbytes() for s in storages}.values()))
        assert ledger.peak().nbytes == most


def test_a_peak_is_what_lived_at_once_and_parts_may_be_named_later():
    with dry_run() as ledger:
        kept = torch.empty(100)
        for _ in range(3):
            passing = torch.empty(1000) * 2
            del passing
        ledger.name("kept", [kept])
        ledger.name("kept", [torch.empty(5)])  # gone by then: nobody asks
        assert ledger.peak().parts == {"kept": 400, "rest": 8000}
        ledger.watch()
        more = kept + kept
        assert ledger.peak().parts == {"kept": 400, "rest": 400}
        assert more.is_meta


def test_an_operation_done_before_makes_memory_of_its_own_again():
    with dry_run() as ledger:
        a = torch.empty(8, 16)
        made = [a @ a.t() for _ in range(4)] + [torch.cat([a, a]) for _ in range(2)]
        assert [m.shape for m in made] == [(8, 8)] * 4 + [(16, 16)] * 2
        assert ledger.peak().nbytes == 512 + 4 * 256 + 2 * 1024
        assert (a + 1).dtype == torch.float32
        whole = torch.empty(3, dtype=torch.int64)
        assert ((whole + 1).dtype, (whole + 1.0).dtype) == (torch.int64, torch.float32)


def test_parts_add_up_and_every_phase_has_a_peak():
    found = of(architecture())
    assert sum(found.parts.values()) == found.peak == found.phases[found.when] == max(found.phases.values())
    assert set(found.phases) == {"load", "generate", "train", "update", "publish"}
    assert found.device == "cpu"
    assert {"process", "weights", "masters", "moments", "published", "kv"} <= set(found.parts)


BIG = architecture(vocab=20_000, hidden=512, layers=3, heads=8, kv_heads=2, head_dim=64, intermediate=1024)


def test_parts_are_what_their_names_say():
    found, weights = of(BIG).parts, BIG.parameters
    assert found["masters"] == 4 * weights
    assert found["moments"] == pytest.approx(8 * weights, rel=0.001)
    assert found["published"] == 2 * weights
    # 2 groups of 4: prompts of 40 tokens are kept as 64, replies of 16 as 32
    assert found["kv"] == BIG.kv_bytes_per_token(4) * (2 * 64 + 8 * 32)


def test_what_saves_memory_and_what_costs_some():
    plain_ = of(BIG).peak
    adapter = of(BIG, **{"lora.rank": 8})
    assert adapter.parts["frozen"] == 2 * BIG.parameters
    assert "gradients" not in adapter.parts or adapter.parts["gradients"] < BIG.parameters // 10
    assert adapter.peak < plain_ - 10 * BIG.parameters
    many = {"group_size": 16, "sampling.max_tokens": 128}
    wide = of(BIG, **many).peak
    assert wide > plain_
    assert of(BIG, **many, **{"optim.checkpointing": True}).peak < wide
    assert of(BIG, **many, **{"optim.tokens_per_microbatch": 256}).peak < wide
    assert of(BIG, **many, **{"optim.share_prompt": False}).peak > wide
    reference = of(BIG, **{"algo.kl": 0.1})
    # a second copy of what the forward passes read, embeddings in bf16 among it
    assert reference.parts["reference"] == pytest.approx(4 * BIG.parameters + 2 * 20_000 * 512, rel=0.1)
    assert of(BIG, **{"engine.dtype": "bfloat16"}).peak < plain_ < of(BIG, **{"sync.dtype": "float32"}).peak


def test_shorter_replies_save_activations_and_not_the_memory_kept_for_longer_ones():
    run = a_run(**{**SMALL, "sampling.max_tokens": 200})
    long, short = estimate(run, BIG, prompt_tokens=40), estimate(run, BIG, prompt_tokens=40, reply_tokens=10)
    assert short.peak < long.peak
    assert short.parts["kv"] == long.parts["kv"]


def test_a_model_far_beyond_the_machine_is_estimated_in_seconds_and_little_memory():
    script = textwrap.dedent(
        """
        import json, sys, time
        import croze as cz
        from croze.loop.usage import peak_mib
        from croze.models.architecture import from_config
        from croze.plan.memory import estimate

        def reward(reply):
            return 0.0

        arch = from_config({"model_type": "llama", "vocab_size": 256_000, "hidden_size": 4096,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 14_336, "max_position_embeddings": 131_072})
        run = cz.Run(model="unused", tasks=[{"prompt": "x"}], reward=reward, groups_per_step=4)
        began = time.process_time()
        found = estimate(run, arch, prompt_tokens=1000)
        print(json.dumps([found.peak, time.process_time() - began, peak_mib(), arch.parameters]))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=one_thread()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    peak, cpu_s, used_mib, parameters = json.loads(done.stdout)
    assert 16 * parameters < peak < 40 * parameters
    assert used_mib < 700
    assert cpu_s < 30


@pytest.mark.parametrize(
    ("words", "prompt"),
    [
        ({}, 5000),  # longer than the context
        ({}, 0),
        ({"sampling.max_tokens": 10_000}, 40),
        (
            {"engine.kv_memory_mib": 1, "sampling.max_tokens": 512, "group_size": 64},
            400,
        ),  # in parts, one by one
        ({"engine.kv_memory_mib": 1, "sampling.max_tokens": 900}, 100),
        ({"group_size": 1, "groups_per_step": 1}, 1),
        ({"engine.attention": "sdpa"}, 40),
        ({"engine.invariant": True}, 40),
        ({"algo.anchor": "recomputed", "optim.minibatches": 2}, 40),
        ({"loop.eval_tasks": 40}, 40),
        ({"sampling.top_p": 1.0, "sampling.stop": "x,y"}, 40),
    ],
)
def test_what_is_odd_is_estimated_all_the_same(words, prompt):
    found = estimate(a_run(**{**SMALL, **words}), architecture(layers=3), prompt_tokens=prompt)
    assert found.peak > 100 * MIB


@pytest.mark.parametrize(
    "changes",
    [
        {"tied": False, "qkv_bias": True, "family": "qwen2"},
        {"qk_norm": True, "family": "qwen3", "kv_heads": 1},
        {"windows": (0, 16), "family": "mistral"},
        {"vocab": 500_000},
        {"context": 8},
    ],
)
def test_every_kind_of_model(changes):
    assert of(architecture(**changes)).peak > 100 * MIB


def test_other_processes_are_told_apart():
    assert set(estimate(a_run(**SMALL), architecture(), prompt_tokens=9).beside) == {"reward worker"}
    beside = estimate(a_run(reward=boxed, **SMALL), architecture(), prompt_tokens=9).beside
    assert beside["sandboxes"] == 16 * 512 * MIB


def test_a_bare_process_is_measured_and_a_broken_model_folder_does_not_matter(tmp_path):
    with BareProcess() as bare:
        measured = bare.size()
    assert 100 * MIB < measured < 1500 * MIB
    files = ModelFiles(name="broken", path=tmp_path, source="")
    with BareProcess(files) as bare:
        assert bare.size() == ASSUMED


def test_a_bare_process_that_nobody_asks_is_ended(tmp_path):
    with BareProcess(ModelFiles(name="unasked", path=tmp_path, source="")) as bare:
        child = bare.child
    assert child is not None
    assert child.poll() is not None


def test_the_measured_peak_is_not_that_of_the_parent():
    ballast = bytearray(600 * MIB)
    ballast[::4096] = b"x" * len(ballast[::4096])
    done = subprocess.run(
        [sys.executable, "-c", "from croze.loop.usage import peak_mib; print(peak_mib())"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert float(done.stdout) < 300
    assert len(ballast) == 600 * MIB


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}
