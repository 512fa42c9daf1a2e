"""Compile the blocks with torch.compile, if that is supported for the run."""

import logging

import torch.nn as nn

from megatron_coca.attention.backends.gated import QUERY_ROWS
from megatron_coca.config import Config
from megatron_coca.config.checks.parallelism import reason_against_compiling

logger = logging.getLogger(__name__)


def missing_compile_tools(device_type: str) -> str | None:
    """Return None, or the reason why torch.compile cannot compile kernels for "cpu" or "cuda" here."""
    # Imported here because the compiler takes seconds to import and few runs use it.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler was found (install g++, or set CXX to one)"
    return "Triton cannot be used here (pip install triton)" if device_type == "cuda" and not has_triton() else None


COMPILE_OPTIONS = {"triton.mix_order_reduction": False}
"""Without this option PyTorch fuses gradients of norms but needs more launches: 41 per layer of CoCA instead of 37."""

UNCOMPILED = {
    "reference": "it is the reference for the others and runs one operation after the other",
    "flex": "its kernel is compiled separately, and a compiled block would compute its mask again in every layer",
}
"""Attention backends with which blocks are not compiled, and the reasons."""


def reason_not_compiled(config: Config, backend: str, device_type: str) -> str | None:
    """Return None, or the reason why the blocks of a training run with this attention backend are not compiled.

    A block is compiled once, so it may depend on the data only through tensors of fixed shapes.
    """
    if backend in UNCOMPILED:
        return f"attention_backend {backend}: {UNCOMPILED[backend]}"
    if config.data.reset_attention_mask and backend != "triton":
        return (
            f"reset_attention_mask: {backend} is called once per document, and the lengths of documents "
            "change with every batch"
        )
    if backend != "triton" and any(kind.attention_chunk_size for kind in config.layer_types.values()):
        return f"attention_chunk_size: {backend} is called once per chunk, from Python"
    dense = [f"pos_emb {kind.pos_emb}" for kind in config.layer_types.values() if kind.embedding.by_query]
    dense += ["attn_logit_softcapping"] * (config.model.attn_logit_softcapping is not None)
    if dense:
        return f"{dense[0]}: its scores are contracted by opt_einsum, which is not traced"
    gated = any(kind.gate for kind in config.layer_types.values()) and config.model.seq_length > QUERY_ROWS
    if gated and backend == "sdpa" and device_type == "cuda":
        return (
            "forgetting_gate: PyTorch's mask of the later blocks of queries is not traced; set attention_backend=triton"
        )
    return reason_against_compiling(config) or missing_compile_tools(device_type)


def compile_blocks(blocks: nn.ModuleList) -> None:
    """Compile every block in place for training. Parameter names stay, and all blocks share the code of the first."""
    logger.info("torch_compile: the first step compiles the blocks and takes longer")
    for block in blocks:
        block.compile(options=COMPILE_OPTIONS)
