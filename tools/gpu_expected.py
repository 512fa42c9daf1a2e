"""Expectations of tools/gpu_report.py, from the counts and assumptions of megatron-coca estimate.

python tools/gpu_expected.py > benchmarks/gpu_expected.json
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

METHODS = ("rotary", "coca", "alibi")
PYTHIA = "Pythia 410M with GPT-NeoX: 2,540 hours of A100 40GB for 299.9B tokens (Biderman et al. 2023)"
PREDICTED = "megatron-coca estimate: predicted step"
LAYER = "FLOPs, bytes and launches of a layer's attention, as in megatron-coca estimate"
DECODED = "the longer of reading all weights and of launching a third of a training pass's kernels"
HELD = "megatron-coca estimate: activations, loss and gradients"
FORWARD = 1 / 3
"""Share of a training pass's kernels in a forward pass."""


def main() -> None:
    """Print all expectations as JSON."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(json.dumps(expectations(), indent=1))


def expectations() -> dict[str, list[dict[str, Any]]]:
    """Return for every part of the report its rows: figure, sense, value by kind of GPU, and where it is from."""
    methods = {name: configured(f"pos_emb={name}") for name in METHODS}
    neox = configured("pos_emb=rotary", *PYTHIA_SHAPE)
    transformers = row("rotary, ratio to transformers", "at most", "0.88 on two CPU cores (docs/speed.md)", 1.0)
    return {
        "tests": [row("failed", "exactly", "all tests pass", 0.0)],
        "step": [
            *(row(f"{name}, MFU %", "about", PREDICTED, partial(mfu, model)) for name, model in methods.items()),
            transformers,
        ],
        "graphs": [
            row(f"{name}, MFU %", "about", PREDICTED, partial(mfu, model.override({"cuda_graphs": True})))
            for name, model in methods.items()
        ],
        "neox": [
            row("rotary, tokens/s", "about", PREDICTED, partial(tokens_per_second, neox)),
            row("rotary, tokens/s", "at least", PYTHIA, 32_800.0),
        ],
        "attention": [
            row(f"{name}, {length}, ms", "about", LAYER, partial(layer_milliseconds, model, 8, length))
            for length in (512, 2048, 8192)
            for name, model in methods.items()
        ],
        "decode": [
            row(f"{name}, {length}, ms", "at most", DECODED, partial(token_milliseconds, model))
            for length in (512, 4096)
            for name, model in methods.items()
        ],
        "tuner": [row("rows", "exactly", "compare with kernels/launch_constants.py", 2.0)],
        "memory": [
            row(f"{name}, 32768, GB", "about", HELD, held_bytes(configured(f"pos_emb={name}", *LONG)) / 1e9)
            for name in ("rotary", "coca")
        ],
    }


def row(figure: str, sense: str, source: str, value: float | Callable[[str], float]) -> dict[str, Any]:
    """Return a row with one value for any GPU, or with that of every kind."""
    from megatron_coca.training.step_time import DEVICES

    values = {gpu: value(gpu) for gpu in DEVICES} if callable(value) else {"any": value}
    rounded = {gpu: float(f"{number:.4g}") for gpu, number in values.items()}
    return {"figure": figure, "sense": sense, "values": rounded, "from": source}


def configured(*keys: str) -> Any:
    """Return the configuration of the 350M models on one GPU, one micro-batch a step, with changes."""
    from megatron_coca.config import load_config

    files = [ROOT / "configs/350M/roformer_coca.yml", ROOT / "configs/cluster/gpu1.yml"]
    return load_config(files, ["train_batch_size=null", "gradient_accumulation_steps=1", *keys])


def mfu(config: Any, gpu: str) -> float:
    """Return the predicted MFU in percent."""
    from megatron_coca.training.step_time import step_time

    return 100 * step_time(config, 1, gpu).mfu


def tokens_per_second(config: Any, gpu: str) -> float:
    """Return the predicted speed."""
    from megatron_coca.training.step_time import step_time

    return config.batch.resolve(1).total * config.model.seq_length / step_time(config, 1, gpu).total


PYTHIA_SHAPE = ("seq_length=2048", "max_position_embeddings=2048", "rotary_pct=0.25", "gpt_j_residual=true")
LONG = ("seq_length=32768", "max_position_embeddings=32768")


def layer_milliseconds(config: Any, samples: int, length: int, gpu: str) -> float:
    """Forward and backward of one attention layer with its projections, on `samples` rows."""
    from megatron_coca.model.cost import BLOCK_LAUNCHES, pass_counts, peak_flops
    from megatron_coca.training.step_time import DEVICES, assumption

    device, h, tokens = DEVICES[gpu], config.model.hidden_size, samples * length
    counts = pass_counts(config.override({"seq_length": length, "max_position_embeddings": length}), samples)
    products = 6 * 4 * h * h / device.products + 6 * h * (length + 1) / device.attention
    # Norms, residual sums and the MLP, 47 of a block's 69 widths and two thirds of its kernels, are not in the layer.
    moved = counts.block_bytes - 47 * h * tokens * 2
    kernels = counts.block_launches - 2 / 3 * BLOCK_LAUNCHES
    computing = tokens * products / (peak_flops(device.name) or 1.0) + moved / device.memory / assumption("memory")
    return 1e3 * float(max(computing, kernels * assumption("launch")))


def token_milliseconds(config: Any, gpu: str) -> float:
    """One decoded token of one row."""
    from megatron_coca.model.cost import parameter_count, pass_counts
    from megatron_coca.training.step_time import DEVICES, assumption

    counts, blocks = pass_counts(config, 1), config.model.num_layers
    kernels = FORWARD * (counts.block_launches * blocks + counts.other_launches)
    read = 2 * parameter_count(config).total / DEVICES[gpu].memory / assumption("memory")
    return 1e3 * float(max(read, kernels * assumption("launch")))


def held_bytes(config: Any) -> float:
    """Peak bytes of a forward and backward pass over one row of seq_length tokens, besides weights and inputs."""
    from megatron_coca.model.cost import activations, loss_bytes, parameter_count

    kept, working, ends = activations(config, 1)
    saved = kept * config.model.num_layers + ends + working + loss_bytes(config, 1)
    return float(saved + 2 * parameter_count(config).total)


if __name__ == "__main__":
    main()
