"""What the training benchmark compares with: Hugging Face transformers' GPT-NeoX, trained by PyTorch alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_coca.config import Config, ConfigError

Step = Callable[[list[Tensor]], float]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def transformers_step(config: Config, device: str, compiled: bool = False) -> Step:
    """A training step of the model of this shape: micro batches int64 [batch, length + 1] -> the mean loss.

    SDPA, fused AdamW with our numbers, clipping, no DeepSpeed. In half precision the weights and the optimizer's
    moments are half precision too, which is less work than our float32 copies are: the comparison favours the peer.

    Raises:
        ConfigError: transformers' GPT-NeoX has no such model.
    """
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM  # a development requirement

    model = GPTNeoXForCausalLM(GPTNeoXConfig(**peer_keys(config))).to(device, DTYPES[config.precision.dtype]).train()
    keys = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=keys.betas, eps=keys.eps, weight_decay=keys.weight_decay, fused=True
    )
    forward = torch.compile(model) if compiled else model

    def step(micro_batches: list[Tensor]) -> float:
        total = torch.zeros((), device=device)
        for samples in micro_batches:
            samples = samples.to(device, non_blocking=True)
            inputs, targets = samples[:, :-1], samples[:, 1:].contiguous()
            loss = forward(inputs, labels=inputs, shift_labels=targets, use_cache=False).loss
            (loss / len(micro_batches)).backward()
            total += loss.detach() / len(micro_batches)
        if keys.gradient_clipping > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), keys.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def peer_keys(config: Config) -> dict[str, Any]:
    """The arguments of GPTNeoXConfig for a model of this shape, with rotary positions.

    Raises:
        ConfigError: it has no such model.
    """
    model, position = config.model, config.position
    plain = {"norm": "layernorm", "num_kv_heads": model.num_attention_heads, "gpt_j_tied": False, "rope_scaling": None}
    flat = config.flat()
    other = [f"{key}={flat[key]}" for key, value in plain.items() if flat[key] != value]
    if other:
        raise ConfigError([f"{', '.join(other)}: transformers' GPT-NeoX has no such model; leave out --peer"])
    return {
        "vocab_size": model.padded_vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_hidden_size,
        "hidden_act": "gelu_fast" if model.bias_gelu_fusion else model.activation,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "max_position_embeddings": model.seq_length,
        "layer_norm_eps": model.layernorm_epsilon,
        "use_parallel_residual": model.gpt_j_residual,
        "attention_bias": model.use_bias_in_attn_linear,
        "tie_word_embeddings": not model.no_weight_tying,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(position.rotary_emb_base),
            "partial_rotary_factor": float(position.rotary_pct),
        },
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
