"""Low-rank adapters. PEFT adds them to our modules. All other weights are frozen, except the parts in `lora.also`."""

import re

import torch

from megatron_coca.config import ConfigError
from megatron_coca.config.optimization import QUERY_KEY_VALUE, AdapterTarget, LoraConfig
from megatron_coca.model import GPT
from megatron_coca.training.optimizer import parts_of, split_projections

LATENT = ("attention.key_value_down", "attention.key_value_up")
"""The two modules with which latent attention computes keys and values together."""
MODULES: dict[AdapterTarget, tuple[str, ...]] = {
    "query": (
        "attention.query_key_value.query",
        *("attention.query", "attention.query_down", "attention.query_up"),  # in latent attention
    ),
    "key": ("attention.query_key_value.key", *LATENT),
    "value": ("attention.query_key_value.value", *LATENT),
    "dense": ("attention.dense",),
    "mlp": ("mlp.linear1", "mlp.linear2"),
}
"""For each target, the modules in a block that get adapters, if the block has them."""
NAME = "default"
"""The name that PEFT gives the adapters. It is part of the names of their parameters in the model."""
PARAMETER = re.compile(rf"\.(lora_\w+)\.{NAME}(?=\.|$)")


def require_peft() -> None:
    """Raise ConfigError if PEFT is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "lora: peft is not installed; run `pip install megatron-coca[adapters]`, or set lora=null"
        ) from error


def add_adapters(model: GPT, lora: LoraConfig, seed: int) -> None:
    """Add adapters to the blocks of a model, in place, and freeze all weights except those of the parts in `lora.also`.

    The packed projections of queries, keys and values are split if `lora.also` names only some of the three, or if
    `lora.targets` names any of them. The initial values depend on `seed` and the shapes: A is uniform as in PEFT, and B
    is 0, so the model computes the same function as before. The global random state is preserved. Call this after
    loading weights and before building an engine. Raises ConfigError if PEFT is not installed.
    """
    require_peft()
    from peft import LoraConfig as Settings
    from peft import inject_adapter_in_model

    trained = {part for part in QUERY_KEY_VALUE if part in lora.also}
    if trained not in (set(), set(QUERY_KEY_VALUE)) or {"query", "key", "value"} & set(lora.targets):
        split_projections(model)
    modules = list(dict.fromkeys(name for target in lora.targets for name in MODULES[target]))
    settings = Settings(target_modules=modules, lora_dropout=lora.dropout, **lora.settings)
    frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model, NAME)
    model.draws = model.draws or lora.dropout > 0
    for name, parameter in model.named_parameters():
        whole = PARAMETER.search(name) is None
        is_selected = not whole or set(parts_of(name)) <= set(lora.also)
        parameter.requires_grad_(is_selected and id(parameter) not in frozen)


def checkpoint_name(name: str) -> str:
    """Convert the name of a parameter in the model to its name in checkpoints."""
    return PARAMETER.sub(r".\1", name)
