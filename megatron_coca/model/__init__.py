"""The transformer language model of GPT-NeoX and LLaMA shape."""

from megatron_coca.model.build import (
    assemble_model,
    build_model,
    choose_backend,
    draw_learned_positions,
    empty_model,
    keep_freed_memory,
)
from megatron_coca.model.generate import DYNAMIC_LENGTH, DYNAMIC_LENGTHS, NOT_GENERATED, DynamicLength, generate
from megatron_coca.model.gpt import GPT, LanguageModelLoss, next_token_loss

__all__ = [
    "DYNAMIC_LENGTH",
    "DYNAMIC_LENGTHS",
    "GPT",
    "NOT_GENERATED",
    "DynamicLength",
    "LanguageModelLoss",
    "assemble_model",
    "build_model",
    "choose_backend",
    "draw_learned_positions",
    "empty_model",
    "generate",
    "keep_freed_memory",
    "next_token_loss",
]
