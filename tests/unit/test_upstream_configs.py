"""Every configuration file of a GPT-NeoX checkout, which GPT_NEOX_HOME names: it loads, or is refused by name."""

import os
from pathlib import Path

import pytest

from megatron_coca.config import ConfigError, load_config
from megatron_coca.config.load import NO_MODEL

HOME = os.environ.get("GPT_NEOX_HOME")
CONFIGS = Path(HOME or "") / "configs"
FILES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yml")) if HOME else []
BEFORE = {"llama/train_config.yml": ("llama/7B.yml", "local_setup.yml")}
"""Files that one without a model is given after; by default 125M.yml."""

REFUSED: dict[str, str] = {
    "20B.yml": "pipe_parallel_size: not available with model_parallel_size",
    "125M-dmoe.yml": "moe_num_experts: mixture of experts is not supported yet",
    "1-3B-transformer-engine.yml": "te_mha: Transformer Engine is not supported yet",
    "bnb_125M.yml": "use_bnb_optimizer: the bitsandbytes optimizer is not supported yet",
    "gmlp_small.yml": "attention_config: attention type gmlp is not supported yet",
    "llemma/7B.yml": "decay_lr_to: unknown key",  # GPT-NeoX itself refuses it
    "llemma/34B.yml": "attention_type: unknown key",  # the same
    "local_setup_comet.yml": "use_comet: Comet is not supported yet",
    **{
        f"mamba/mamba-{size}.yml": "attention_config: attention type mamba is not supported yet"
        for size in ("130M", "370M", "790M", "1.4B", "2.8B")
    },
    "mistral/7B.yml": "sliding_window_width: sliding-window attention is not supported yet",
    "rwkv/170M.yml": "attention_config: attention type rwkv is not supported yet",
    "sparse.yml": "sparsity_config: sparse attention is not supported yet",
}
"""Files that are refused, and a part of the reason."""


def refusal(name: str) -> str:
    """The error of a file, after a model's if it describes none (paths, generation, profiling), or nothing."""
    for before in ((), BEFORE.get(name, ("125M.yml",))):
        try:
            load_config([CONFIGS / each for each in (*before, name)])
            return ""
        except ConfigError as error:
            message = str(error)
        if NO_MODEL not in message:
            break
    return message


@pytest.mark.skipif(HOME is None, reason="GPT_NEOX_HOME is not set")
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_gpt_neox(name: str) -> None:
    message = refusal(name)
    assert (name in REFUSED) == bool(message), message
    assert REFUSED.get(name, "") in message
