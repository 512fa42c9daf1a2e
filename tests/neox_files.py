"""Checkpoints in the layout of GPT-NeoX, cut and named by hand, for tests of reading without the code that writes."""

import random
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

GATED = {"swiglu", "geglu"}


def write_neox(save: Path, keys: Mapping[str, Any], weights: Mapping[str, Tensor], step: int = 20) -> Path:
    """The folder of one step of a run with the configuration `keys`, which decides about the layout as well.

    `weights` are whole, by our names.
    """
    folder = save / f"global_step{step}"
    (folder / "configs").mkdir(parents=True)
    ranks, piped = keys.get("model_parallel_size", 1), keys.get("pipe_parallel_size", 0) > 0
    for rank in range(ranks):
        module: dict[str, Tensor] = OrderedDict()
        for number, state in _layers(keys, weights, rank, ranks).items():
            if piped:
                torch.save(OrderedDict(state), folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
            module |= {f"sequential.{number}.{name}": tensor for name, tensor in state.items()}
        torch.save(_rank(None if piped else module, ranks, step), folder / f"mp_rank_{rank:02d}_model_states.pt")
    write_configs(folder, keys)
    (save / "latest").write_text(folder.name)
    return folder


def write_configs(folder: Path, keys: Mapping[str, Any]) -> None:
    """The YAML files of a run: the model in one, with hyphens, the run in another."""
    model = {name.replace("_", "-"): value for name, value in keys.items() if name != "vocab_size"}
    run = {"train_iters": 100, "optimizer": {"type": "Lion", "params": {"lr": 3e-4}}, "eval-tasks": ["lambada_openai"]}
    run |= {"sequence-parallel": True, "hostfile": "/mock_path", "make-vocab-size-divisible-by": 128}
    (folder / "configs" / "model.yml").write_text(yaml.safe_dump(model))
    (folder / "configs" / "run.yml").write_text(yaml.safe_dump(run))


def _layers(
    keys: Mapping[str, Any], weights: Mapping[str, Tensor], rank: int, ranks: int
) -> dict[int, dict[str, Tensor]]:
    layers = keys["num_layers"]
    found: dict[int, dict[str, Tensor]] = {number: {} for number in (0, *range(2, layers + 2), layers + 3)}
    for name, tensor in weights.items():
        if name.startswith("embedding."):
            part = tensor.chunk(ranks)[rank] if "word" in name else tensor
            found[0][name.removeprefix("embedding.")] = part.clone()
        elif name.startswith("norm."):
            found[layers + 3][_norm(keys, name)] = tensor.clone()
        elif name == "final_linear.weight":
            found[layers + 4] = {name: tensor.chunk(ranks)[rank].clone()}
        elif name == "positions.bias.weight":
            for number in range(2, layers + 2):
                found[number]["attention.rpe.weight"] = tensor.chunk(ranks, dim=1)[rank].clone()
        else:
            _, number, inner = name.split(".", 2)
            found[int(number) + 2][_norm(keys, inner)] = _part(keys, inner, tensor, rank, ranks).clone()
    if keys["pos_emb"] == "alibi":
        heads = keys["num_attention_heads"]
        slopes = torch.tensor([2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)]).chunk(ranks)[rank]
        for number in range(2, layers + 2):
            found[number]["attention.alibi_embed.slopes"] = slopes.clone()
    return found


def _norm(keys: Mapping[str, Any], name: str) -> str:
    return name.replace("norm.weight", "norm.scale") if keys.get("norm") == "rmsnorm" else name


def _part(keys: Mapping[str, Any], name: str, tensor: Tensor, rank: int, ranks: int) -> Tensor:
    heads, kv_heads = keys["num_attention_heads"], keys.get("num_kv_heads", keys["num_attention_heads"])
    layer, _, kind = name.rpartition(".")
    if layer == "attention.query_key_value" and kv_heads != heads:
        width = len(tensor) // (heads + 2 * kv_heads)
        q, k, v = tensor.split([heads * width, kv_heads * width, kv_heads * width])
        return torch.cat([q.chunk(ranks)[rank], k.chunk(ranks)[rank], v.chunk(ranks)[rank]])
    if layer == "mlp.linear1" and keys.get("activation") in GATED:
        value, gate = tensor.chunk(2)
        return torch.cat([value.chunk(ranks)[rank], gate.chunk(ranks)[rank]])
    if layer in ("attention.query_key_value", "mlp.linear1"):
        return tensor.chunk(ranks)[rank]
    if layer in ("attention.dense", "mlp.linear2") and kind == "weight":
        return tensor.chunk(ranks, dim=1)[rank]
    if layer in ("attention.dense", "mlp.linear2") and keys.get("gpt_j_residual"):
        # Such biases are added before the sum over ranks: here they are a part each.
        return tensor * (rank + 1) / (ranks * (ranks + 1) / 2)
    return tensor


def _rank(module: dict[str, Tensor] | None, ranks: int, step: int) -> dict[str, Any]:
    """What DeepSpeed and GPT-NeoX put beside the weights."""
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": {"state": {0: {"step": 3, "exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": np.float64(0.1)}]},
        "param_shapes": [OrderedDict({"weight": torch.Size([2, 3])})],
        "sparse_tensor_module_names": {"none"},
        "lr_scheduler": {"start_lr": 0.1, "warmup_iter": np.float64(1.5), "num_iters": step, "decay_style": "cosine"},
        **{"global_steps": step, "global_samples": 4 * step, "skipped_steps": 0, "dp_world_size": 1},
        **{"mp_world_size": ranks, "ds_config": {"train_batch_size": 4}, "ds_version": "0.19.8"},
        **{"iteration": step, "args": {"num_layers": 2}, "random_rng_state": random.getstate()},
        **{"np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state()},
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }
