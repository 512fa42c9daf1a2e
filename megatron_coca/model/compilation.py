"""Compile the blocks with torch.compile, if the configuration of the run supports it."""

import logging

import torch.nn as nn

from megatron_coca.attention.backends.gated import QUERY_ROWS
from megatron_coca.config import Config
from megatron_coca.config.backends import BACKENDS
from megatron_coca.config.checks.parallelism import reason_against_compiling

logger = logging.getLogger(__name__)


def missing_compile_tools(device_type: str) -> str | None:
    """Return the reason why torch.compile cannot compile kernels for "cpu" or "cuda" on this machine, or None if it
    can.
    """
    # These imports are not at the top of the file, because the compiler takes seconds to import and few runs use it.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler was found (install g++, or set CXX to the path of a compiler)"
    return (
        "Triton is not usable on this machine (pip install triton)"
        if device_type == "cuda" and not has_triton()
        else None
    )


COMPILE_OPTIONS = {"triton.mix_order_reduction": False}
"""If this option is not set, PyTorch fuses the gradients of norms but launches 41 kernels per CoCA layer instead of 37.
"""

UNCOMPILED = {name: declared.uncompiled for name, declared in BACKENDS.items() if declared.uncompiled is not None}
"""The reason why blocks are not compiled, for each attention backend that prevents compilation."""


def reason_not_compiled(config: Config, backend: str, device_type: str) -> str | None:
    """Return the reason why the blocks of a training run with this attention backend are not compiled, or None if they
    are compiled.

    A block is compiled only once, so every batch must reach it as tensors of the same shapes.
    """
    if backend in UNCOMPILED:
        return f"attention_backend {backend}: {UNCOMPILED[backend]}"
    if config.data.reset_attention_mask and backend != "triton":
        return (
            f"reset_attention_mask: {backend} is called once per document, and document lengths change with every batch"
        )
    if backend != "triton" and any(kind.attention_chunk_size for kind in config.layer_types.values()):
        return f"attention_chunk_size: a Python loop calls {backend} once per chunk"
    dense = [f"pos_emb {kind.pos_emb}" for kind in config.layer_types.values() if kind.embedding.by_query]
    dense += ["attn_logit_softcapping"] * (config.model.attn_logit_softcapping is not None)
    if dense:
        return f"{dense[0]}: opt_einsum computes its attention scores, and torch.compile cannot trace opt_einsum"
    gated = any(kind.gate for kind in config.layer_types.values()) and config.model.seq_length > QUERY_ROWS
    if gated and backend == "sdpa" and device_type == "cuda":
        return (
            "forgetting_gate: torch.compile does not trace the masks that sdpa builds for later query blocks; set "
            "attention_backend=triton"
        )
    return reason_against_compiling(config) or missing_compile_tools(device_type)


def compile_blocks(blocks: nn.ModuleList) -> None:
    """Compile every block in place for training. Parameter names do not change, and all blocks share the compiled code
    of the first block.
    """
    logger.info("torch_compile: the first step takes longer, because it compiles the blocks")
    for block in blocks:
        block.compile(options=COMPILE_OPTIONS)
