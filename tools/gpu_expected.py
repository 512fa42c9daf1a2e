"""Expectations of tools/gpu_report.py, from the counts and assumptions of tools/estimate.py.

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
PREDICTED = "tools/estimate.py: predicted step"
LAYER = "FLOPs, bytes and launches of a layer's attention, as in tools/estimate.py"
DECODED = "the longer of reading all weights and of launching a third of a training pass's kernels"
HELD = "tools/estimate.py: activations, loss and gradients"
FORWARD = 1 / 3
"""Share of a training pass's kernels in a forward pass."""


def main() -> None:
    """Print all expectations as JSON."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(json.dumps(expectations(), indent=1))


def expectations() -> dict[str, list[dict[str, Any]]]:
    """Return for every part of the report its rows: figure, sense, value by kind of GPU, and where it is from."""
    from megatron_coca.config import Config, load_config
    from megatron_coca.model.cost import peak_flops
    from megatron_coca.training.step_time import DEVICES, step_time

    def config(*keys: str) -> Config:
        files = [ROOT / "configs/350M/roformer_coca.yml", ROOT / "configs/cluster/gpu1.yml"]
        return load_config(files, ["train_batch_size=null", "gradient_accumulation_steps=1", *keys])

    def row(figure: str, sense: str, source: str, value: Callable[[str], float]) -> dict[str, Any]:
        return {"figure": figure, "sense": sense, "values": by_gpu(value), "from": source}

    def by_gpu(value: Callable[[str], float]) -> dict[str, float]:
        return {gpu: float(f"{value(gpu):.4g}") for gpu in DEVICES}

    def mfu(method: str, gpu: str) -> float:
        return 100 * step_time(config(f"pos_emb={method}"), 1, gpu).mfu

    def layer(method: str, length: int, gpu: str) -> float:
        return 1e3 * layer_seconds(config(f"pos_emb={method}"), gpu, 8, length)

    def token(method: str, gpu: str) -> float:
        return 1e3 * token_seconds(config(f"pos_emb={method}"), gpu)

    shape = ("seq_length=2048", "max_position_embeddings=2048", "rotary_pct=0.25", "gpt_j_residual=true")
    neox = config("pos_emb=rotary", *shape)

    def neox_speed(gpu: str) -> float:
        return 16 * 2048 / step_time(neox, 1, gpu).total

    lengths = {"attention": (512, 2048, 8192), "decode": (512, 4096)}
    assert all(peak_flops(device.name) for device in DEVICES.values())
    return {
        "tests": [{"figure": "failed", "sense": "exactly", "values": {"any": 0.0}, "from": "all tests pass"}],
        "step": [
            *(row(f"{name}, MFU %", "about", PREDICTED, partial(mfu, name)) for name in METHODS),
            {
                "figure": "rotary, ratio to transformers",
                "sense": "at most",
                "values": {"any": 1.0},
                "from": "0.88 on two CPU cores (docs/speed.md)",
            },
        ],
        "neox": [
            row("rotary, tokens/s", "about", PREDICTED, neox_speed),
            {"figure": "rotary, tokens/s", "sense": "at least", "values": {"any": 32_800.0}, "from": PYTHIA},
        ],
        "attention": [
            row(
                f"{name}, {length}, ms",
                "about",
                LAYER,
                partial(layer, name, length),
            )
            for length in lengths["attention"]
            for name in METHODS
        ],
        "decode": [
            row(
                f"{name}, {length}, ms",
                "at most",
                DECODED,
                partial(token, name),
            )
            for length in lengths["decode"]
            for name in METHODS
        ],
        "tuner": [
            {"figure": "rows", "sense": "exactly", "values": {"any": 2.0}, "from": "compare with kernels/plan.py"}
        ],
        "memory": [
            {
                "figure": f"{name}, 32768, GB",
                "sense": "about",
                "values": {"any": float(f"{held_bytes(config(f'pos_emb={name}', *LONG)) / 1e9:.4g}")},
                "from": HELD,
            }
            for name in ("rotary", "coca")
        ],
    }


LONG = ("seq_length=32768", "max_position_embeddings=32768")


def layer_seconds(config: Any, gpu: str, samples: int, length: int) -> float:
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
    return float(max(computing, kernels * assumption("launch")))


def token_seconds(config: Any, gpu: str) -> float:
    """One decoded token of one row."""
    from megatron_coca.model.cost import parameter_count, pass_counts
    from megatron_coca.training.step_time import DEVICES, assumption

    counts, blocks = pass_counts(config, 1), config.model.num_layers
    kernels = FORWARD * (counts.block_launches * blocks + counts.other_launches)
    read = 2 * parameter_count(config).total / DEVICES[gpu].memory / assumption("memory")
    return float(max(read, kernels * assumption("launch")))


def held_bytes(config: Any) -> float:
    """Peak bytes of a forward and backward pass over one row of seq_length tokens, besides weights and inputs."""
    from megatron_coca.model.cost import activations, loss_bytes, parameter_count

    kept, working, ends = activations(config, 1)
    saved = kept * config.model.num_layers + ends + working + loss_bytes(config, 1)
    return float(saved + 2 * parameter_count(config).total)


if __name__ == "__main__":
    main()
