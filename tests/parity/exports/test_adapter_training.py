"""Our trainer's steps with adapters beside a plain loop with transformers and peft: losses and all trained weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
)

from megatron_coca.checkpoints.importing import starting_config
from megatron_coca.data import Batch
from megatron_coca.training.adapters import add_adapters
from megatron_coca.training.checkpointing.initial_model import initial_model
from megatron_coca.training.engine import build_engine
from megatron_coca.training.engine.state import saved_names
from tests.checkpoint_files import run_alone

STEPS, RATE, LENGTH, ROWS = 5, 2e-2, 24, 4
LOSSES, WEIGHTS = 2e-5, 5e-4
"""Relative and absolute. Both compute in float32 with sums in another order, and Adam divides by the root of small
squares; a weight moves by up to 0.1 in these steps.
"""
SHAPE = {"vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}


def llama() -> Any:
    keys = {"intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**SHAPE | keys))


def gpt_neox() -> Any:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE, intermediate_size=64, max_position_embeddings=64))


def minicpm3() -> Any:
    """Latent attention. Its files have the rotated features in our order."""
    keys = {"intermediate_size": 40, "num_key_value_heads": 4, "max_position_embeddings": 64, "kv_lora_rank": 12}
    keys |= {"q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5}
    return MiniCPM3ForCausalLM(MiniCPM3Config(**SHAPE | keys, tie_word_embeddings=False))


PROJECTIONS = {f"attention.query_key_value.{part}": f"self_attn.{part[0]}_proj" for part in ("query", "key", "value")}
PROJECTIONS |= {"attention.dense": "self_attn.o_proj", "mlp.linear2": "mlp.down_proj"}
NEOX = {"attention.dense": "attention.dense", "mlp.linear1": "mlp.dense_h_to_4h", "mlp.linear2": "mlp.dense_4h_to_h"}
LATENT = {"query_down": "q_a_proj", "query_up": "q_b_proj", "key_value_down": "kv_a_proj_with_mqa"}
LATENT |= {"key_value_up": "kv_b_proj", "dense": "o_proj"}
MINICPM = {f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in LATENT.items()}
NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
CASES: dict[str, tuple[Any, dict[str, str], str, dict[str, Any]]] = {
    "LLaMA": (llama, PROJECTIONS, "model.layers", {"targets": ["query", "key", "value", "dense"]}),
    "LLaMA, norms": (llama, PROJECTIONS, "model.layers", {"also": ["norms"]}),
    "LLaMA, rsLoRA": (llama, PROJECTIONS, "model.layers", {"rslora": True, "targets": ["query", "value"]}),
    "LLaMA, DoRA": (llama, PROJECTIONS, "model.layers", {"dora": True}),
    "MiniCPM 3": (minicpm3, MINICPM, "model.layers", {"targets": ["query", "key", "value", "dense"]}),
    "GPT-NeoX": (gpt_neox, NEOX, "gpt_neox.layers", {"targets": ["dense", "mlp"]}),
}


def theirs_of(name: str, names: dict[str, str], layers: str) -> str:
    """Their name of one of our trained parameters."""
    if not name.startswith("blocks."):
        return f"base_model.model.{layers.partition('.')[0]}.{name}".replace("norm.", "norm.modules_to_save.default.")
    _, number, inner = name.split(".", 2)
    module, found, part = inner.partition(".lora_")
    if not found:
        module, _, kind = inner.rpartition(".")
        return f"base_model.model.{layers}.{number}.{NORMS[module]}.modules_to_save.default.{kind}"
    parameter, _, kind = f"lora_{part}".partition(".")
    return f"base_model.model.{layers}.{number}.{names[module]}.{parameter}.default.{kind}"


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(96, (ROWS, LENGTH + 1), generator=generator) for _ in range(STEPS)]


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_a_loop_with_peft(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the native engine; test_adapter_runs.py compares the engines."""
    make, names, layers, given = CASES[case]
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "base")
    lora = {"rank": 4, "alpha": 8} | given
    keys: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "engine": "native"}
    keys |= {"optimizer.params.lr": RATE, "weight_decay": 0.1, "gradient_clipping": 0.5, "lora": lora}
    config = starting_config(tmp_path / "base", keys)
    model = initial_model(config, "cpu").model
    assert config.optimizer.lora is not None
    add_adapters(model, config.optimizer.lora, 3)
    ours = {name: weight for weight, name in saved_names(model, True).items()}

    targets = {names[name.split(".", 2)[2].partition(".lora_")[0]] for name in ours if ".lora_" in name}
    settings = config.optimizer.lora.settings
    norms = ["input_layernorm", "post_attention_layernorm", "model.norm"] if lora.get("also") else None
    torch.manual_seed(1)
    base = type(make()).from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = get_peft_model(base, LoraConfig(target_modules=sorted(targets), modules_to_save=norms, **settings)).train()
    weights = dict(theirs.named_parameters())
    pairs = {name: weights[theirs_of(name, names, layers)] for name in ours}
    with torch.no_grad():
        for name, weight in pairs.items():
            weight.copy_(ours[name])
    learning = [weight for weight in weights.values() if weight.requires_grad]
    assert {id(weight) for weight in learning} == {id(weight) for weight in pairs.values()}

    run_alone(monkeypatch)
    sizes = config.batch.resolve(1)
    model.train()
    trainer = build_engine(model, config, sizes)
    decays = [[weight for weight in learning if (weight.dim() >= 2) == wide] for wide in (True, False)]
    groups = [{"params": group, "weight_decay": 0.1 * wide} for group, wide in zip(decays, (1, 0), strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    for batch in batches():
        step = trainer.train_step(list(Batch(batch.numpy().astype(np.int64)).split(sizes.micro)), RATE)
        losses = []
        for part in batch.split(sizes.micro):
            logits = theirs(input_ids=part[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
            (loss / sizes.accumulation).backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(learning, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert step.loss == pytest.approx(sum(losses) / len(losses), rel=LOSSES)
        assert step.grad_norm == pytest.approx(float(norm), rel=1e-3)
    found = {piece.name: piece.tensor for piece in trainer.pieces() if piece.kind == "weight"}
    assert found.keys() == pairs.keys()
    for name, weight in pairs.items():
        torch.testing.assert_close(found[name].view(weight.shape), weight.detach(), rtol=0, atol=WEIGHTS)
