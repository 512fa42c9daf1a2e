"""Compare the loss and all gradients of small models on a GPU in bfloat16 with the CPU in float32.

    python tools/gpu/parity.py --output results/gpu/parity.eager.jsonl [--compile]

The error of the loss and of each gradient may be at most twice that of the CPU in bfloat16, with the same weights and
tokens.
"""

import argparse
import copy
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_coca.config import load_config
from megatron_coca.evaluation.subject import backend_name
from megatron_coca.model import LanguageModelLoss, build_model
from tools.gpu.cases import run_in_parallel
from tools.gpu.speed import available

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 256}
SHAPE |= {"vocab_size": 4099, "no_weight_tying": True, "init_method_std": 0.06}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2, "use_bias_in_attn_linear": False}
REROPE = {"relative_positions": {"type": "rerope", "window": 64}}
PATHS: dict[str, dict[str, Any]] = {
    "rotary": {"pos_emb": "rotary"},
    "coca": {"pos_emb": "coca"},
    "alibi": {"pos_emb": "alibi"},
    "coca, packed documents": {"pos_emb": "coca", "reset_attention_mask": True, "reset_position_ids": True},
    "rotary, rerope": {"pos_emb": "rotary", **REROPE},
    "coca, rerope": {"pos_emb": "coca", **REROPE},
    "rotary, a quarter of the features": {"pos_emb": "rotary", "rotary_pct": 0.25},
    "rotary, llama block": {"pos_emb": "rotary", **LLAMA},
    "coca_strict": {"pos_emb": "coca_strict"},
    "kerple_log": {"pos_emb": "kerple_log"},
    "rpe": {"pos_emb": "rpe"},
    "none": {"pos_emb": "none"},
    "learned": {"pos_emb": "learned"},
    "xpos": {"pos_emb": "xpos"},
    "rotary, lm_infinite": {"pos_emb": "rotary", "relative_positions": {"type": "lm_infinite", "window": 64}},
    "forgetting gate": {"pos_emb": "none", "forgetting_gate": "fox"},
    "pope": {"pos_emb": "pope"},
    "pope, triton": {"pos_emb": "pope", "attention_backend": "triton"},
    "polar": {"pos_emb": "polar"},
    "kerple_power": {"pos_emb": "kerple_power"},
    "sandwich": {"pos_emb": "sandwich"},
    "fire": {"pos_emb": "fire"},
    "sinusoidal": {"pos_emb": "sinusoidal"},
}
"""Names of default paths -> keys. Methods that this version does not declare are left out."""
FLOOR = 5e-3
"""A part of every limit, because a single number, such as the loss, may be exact on the CPU by chance."""


def results(model: LanguageModelLoss, samples: Tensor, documents: Tensor | None) -> dict[str, Tensor]:
    """Return the loss and the gradient of every parameter by name, float64 on the CPU."""
    loss = model(samples, documents=documents)
    loss.backward()
    weights = model.model.named_parameters()
    grads = {name: weight.grad.double().cpu() for name, weight in weights if weight.grad is not None}
    return {"loss": loss.detach().double().cpu(), **grads}


def relative(got: Tensor, true: Tensor) -> float:
    """Return the norm of the error, relative to the norm of the true values."""
    return float((got - true).norm() / true.norm().clamp(min=1e-12))


def _excess(error: float, on_cpu: float) -> float:
    """Return how far an error is above its limit. NaN is above every limit; `max` alone would pass over it."""
    excess = error - 2 * on_cpu
    return math.inf if math.isnan(excess) else excess


def compare(keys: dict[str, Any], device: str, compiled: bool, values: bool) -> dict[str, Any]:
    """Compare one path, and return the errors and the attention backend.

    Raises:
        AssertionError: an error is too large.
    """
    config = load_config([], SHAPE | keys | {"torch_compile": False})
    if compiled and device == "cpu":
        raise ValueError("--compile: this program compiles only on a GPU; leave it out")
    on_cpu = LanguageModelLoss(build_model(config)).train()
    there = build_model(config.override({"torch_compile": "auto" if compiled else False}), device)
    there.load_state_dict(on_cpu.model.state_dict())
    samples = torch.randint(4099, (2, 257), generator=torch.Generator().manual_seed(1))
    documents = (torch.arange(256) // 77).expand(2, -1).contiguous() if config.data.reset_attention_mask else None
    half = copy.deepcopy(on_cpu).bfloat16()
    exact, theirs = results(on_cpu, samples, documents), results(half, samples, documents)
    mine = results(LanguageModelLoss(there.bfloat16()).train(), samples.to(device), documents)
    if mine.keys() != exact.keys():
        raise AssertionError(f"gradients: only on one device: {', '.join(sorted(mine.keys() ^ exact.keys()))}")
    errors = {name: (relative(mine[name], true), relative(theirs[name], true)) for name, true in exact.items()}
    worst = max(errors, key=lambda name: _excess(*errors[name]))
    figures: dict[str, Any] = {"backend": backend_name(there), "loss": float(exact["loss"]), "worst": worst}
    figures |= {"loss_error": errors["loss"][0], "worst_error": errors[worst][0], "worst_on_cpu": errors[worst][1]}
    if values:
        limit = 2 * errors[worst][1] + FLOOR
        assert errors[worst][0] <= limit, f"{worst}: error {errors[worst][0]:.2e}, allowed {limit:.2e}"
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare all paths; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help="file of results")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--compile", action="store_true", help="compile the blocks, as in training")
    parser.add_argument("--only", nargs="+", choices=PATHS, default=list(PATHS), help="default: all paths")
    parser.add_argument("--without-values", action="store_true", help="compare nothing")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    call = partial(compare, device=options.device, compiled=options.compile, values=not options.without_values)
    paths = {name: partial(call, PATHS[name]) for name in options.only if available(PATHS[name])}
    return run_in_parallel(paths, options.output, options.share)


if __name__ == "__main__":
    sys.exit(main())
