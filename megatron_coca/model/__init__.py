"""The transformer language model, with the architectures of GPT-NeoX and LLaMA."""

from megatron_coca.model.build import (
    Attention,
    assemble_model,
    build_model,
    choose_backends,
    draw_learned_positions,
    empty_model,
    gpu_backends,
    initial_norms,
)
from megatron_coca.model.generate import (
    DECODING,
    DYNAMIC_LENGTH,
    DYNAMIC_LENGTHS,
    GREEDY,
    NOT_GENERATED,
    Decoding,
    DecodingError,
    DynamicLength,
    Sampling,
    check_reach,
    equal_length_batches,
    generate,
    generate_tokens,
    row_seeds,
)
from megatron_coca.model.gpt import GPT, LanguageModelLoss
from megatron_coca.model.loss import next_token_loss
from megatron_coca.model.shared_prefix import SharedPrefix, prefix_order
