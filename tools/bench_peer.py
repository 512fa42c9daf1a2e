"""What the training benchmark compares with: Hugging Face transformers' GPT-NeoX, trained by PyTorch alone."""

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_coca.config import Config, ConfigError
from megatron_coca.model import keep_freed_memory

MEMORY_EVENT = "[memory]"


class Step(Protocol):
    """One training step."""

    def __call__(self, micro_batches: list[Tensor], /) -> float:
        """Take the micro batches of a step, int64 [batch, length + 1] each; gives the mean loss."""
        ...

    def peak(self, micro_batches: list[Tensor], /) -> int:
        """The most bytes that such a step holds beyond what lies there between steps."""
        ...


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Peer:
    """The step of `transformers_step` in a process of its own, which nothing of this project has been set up in.

    `keeps_memory` gives it our setting of the C library's allocator.
    """

    def __init__(self, config: Config, device: str, compiled: bool, keeps_memory: bool) -> None:
        peer_keys(config)  # an error is told here
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, config, device, compiled, keeps_memory, torch.get_num_threads())
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()

    def __call__(self, micro_batches: list[Tensor]) -> float:
        return self._ask("step", micro_batches)

    def peak(self, micro_batches: list[Tensor]) -> int:
        return int(self._ask("peak", micro_batches))

    def _ask(self, what: str, micro_batches: list[Tensor]) -> float:
        self._connection.send((what, [each.numpy() for each in micro_batches]))
        return self._connection.recv()


def _serve(
    connection: Connection, config: Config, device: str, compiled: bool, keeps_memory: bool, threads: int
) -> None:
    torch.set_num_threads(threads)
    if keeps_memory:
        keep_freed_memory()
    step = transformers_step(config, device, compiled)
    answers: dict[str, Callable[[list[Tensor]], float]] = {
        "step": step,
        "peak": lambda batches: peak_bytes(lambda: step(batches)),
    }
    while True:
        try:
            what, arrays = connection.recv()
        except EOFError:
            return
        answer = answers[what]([torch.from_numpy(each) for each in arrays])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        connection.send(answer)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes of tensors that were held at once during a call, beyond those before it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        call()
    events = [each for each in run.profiler.kineto_results.events() if each.name() == MEMORY_EVENT]
    held = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def transformers_step(config: Config, device: str, compiled: bool = False) -> Callable[[list[Tensor]], float]:
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
