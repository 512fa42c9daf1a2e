"""The dtype that `--dtype auto` chooses: bfloat16 if it is clearly faster than float32 for this model on this device.

bfloat16 is fast only on processors with instructions for it, so the choice is measured.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.config import ModelConfig

GAIN = 1.25
"""bfloat16 is chosen only if it is this many times as fast as float32, because its rounding errors are larger."""
TOKENS, ROUNDS = 512, 5


def chosen_dtype(model: ModelConfig, device: str) -> tuple[str, str]:
    """Return "bfloat16" or "float32" for a model of this shape, and a sentence with the measured times.

    Causal attention and the first matrix product of a feed-forward layer are timed together, alternately in float32 and
    in bfloat16. The shortest time of each dtype counts.
    """
    work = {dtype: _work(model, device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    seconds = {dtype: float("inf") for dtype in work}
    for _ in range(ROUNDS + 1):  # the first round also loads the kernels
        for dtype, run in work.items():
            seconds[dtype] = min(seconds[dtype], _seconds(run, device))
    gain = seconds[torch.float32] / seconds[torch.bfloat16]
    chosen = "bfloat16" if gain >= GAIN else "float32"
    times = ", ".join(f"{str(dtype).removeprefix('torch.')} {1e3 * took:.2f} ms" for dtype, took in seconds.items())
    return chosen, f"--dtype auto: {chosen} (a product and attention of {TOKENS} tokens on {device}: {times})"


def _work(model: ModelConfig, device: str, dtype: torch.dtype) -> Callable[[], Tensor]:
    hidden = torch.full((TOKENS, model.hidden_size), 0.1, dtype=dtype, device=device)
    weight = torch.full((model.ffn_hidden_size, model.hidden_size), 0.1, dtype=dtype, device=device)
    heads = torch.full((1, model.num_attention_heads, TOKENS, model.head_dim), 0.1, dtype=dtype, device=device)

    @torch.inference_mode()
    def run() -> Tensor:
        F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return F.linear(hidden, weight)

    return run


def _seconds(run: Callable[[], Tensor], device: str) -> float:
    start = time.perf_counter()
    run()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
