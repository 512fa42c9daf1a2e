"""GPT-NeoX's models and ours with the same weights, in one process. Runs inside a GPT-NeoX checkout."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from megatron.initialize import initialize_megatron
from megatron.model.gpt2_model import GPT2ModelPipe
from megatron.mpu import get_model_parallel_rank, get_model_parallel_world_size, get_topology
from megatron.neox_arguments import NeoXArgs

from megatron_coca.checkpoints.neox.layout import table
from megatron_coca.config import Config, load_config
from megatron_coca.model import GPT, build_model

VOCABULARY = 96
BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 128,
    "no_weight_tying": True,
    "pos_emb": "coca",
    "make_vocab_size_divisible_by": 2,
}
THEIRS_ONLY: dict[str, Any] = {
    "optimizer": {"type": "cpu_adam", "params": {"lr": 1e-3}},
    "train_micro_batch_size_per_gpu": 1,
    "train_iters": 10,
    "data_impl": "mmap",
    "distributed_backend": "gloo",
}


def arguments(keys: Mapping[str, Any]) -> Any:
    """NeoXArgs of a model with `keys`, ready for building it. The process group is made with the first."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    values = BASE | THEIRS_ONLY | dict(keys) | {"global_num_gpus": ranks, "model_parallel_size": ranks}
    made = NeoXArgs.from_dict(values)
    made.configure_distributed_args()
    made.padded_vocab_size = VOCABULARY
    if not torch.distributed.is_initialized():
        initialize_megatron(made)
    return made


def our_config(keys: Mapping[str, Any]) -> Config:
    """Our configuration of the same model."""
    return load_config([], BASE | dict(keys) | {"vocab_size": VOCABULARY})


def ours(keys: Mapping[str, Any]) -> GPT:
    """Our model in evaluation, with weights that make attention matter: a layer's first ones are small."""
    torch.manual_seed(0)
    model = build_model(our_config(keys)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


def theirs(made: Any, use_cache: bool = False) -> torch.nn.Module:
    """GPT-NeoX's model, as one module without pipeline stages."""
    torch.manual_seed(1)
    model = GPT2ModelPipe(made, num_tokentypes=0, parallel_output=False, topology=get_topology(), use_cache=use_cache)
    return model.to_sequential().eval()


def parameters(
    model: torch.nn.Module, config: Config, ours: Mapping[str, torch.Tensor]
) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Each parameter of GPT-NeoX's model beside this rank's part of ours, by our layout of its checkpoints.

    Raises AssertionError where the layout lacks a parameter or names one that is not there.
    """
    present, rank, ranks = dict(model.named_parameters()), get_model_parallel_rank(), get_model_parallel_world_size()
    parts = {
        f"sequential.{place.layer}.{place.name}": held.sharding.split(ours[held.ours], ranks)[rank]
        for place, held in table(config).items()
        if held.ours in ours
    }
    assert present.keys() == parts.keys(), present.keys() ^ parts.keys()
    return [(present[name], part) for name, part in parts.items()]


@torch.no_grad()
def give_weights(model: torch.nn.Module, config: Config, weights: Mapping[str, torch.Tensor]) -> None:
    """Put our weights, by our names, into GPT-NeoX's model."""
    for weight, part in parameters(model, config, weights):
        weight.copy_(part)


def forward(model: torch.nn.Module, tokens: torch.Tensor, begin: int = 0) -> torch.Tensor:
    """Logits [batch, length, vocabulary] of tokens [batch, length], the first of which is number `begin`. The mask is
    of these tokens alone, as GPT-NeoX makes it without pipeline stages.
    """
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    return model((tokens, torch.arange(begin, begin + length).expand_as(tokens), mask))
