"""Checkpoints as training writes them, without training: for tests of what reads them."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megatron_coca.checkpoints import native
from megatron_coca.config import Config
from megatron_coca.data import Tokenizer, load_tokenizer
from megatron_coca.model import build_model

BYTES = load_tokenizer("CharLevelTokenizer")
NEEDED = ("state/rank_00000.safetensors", "rng/rank_0.pt")
"""What a complete checkpoint has besides, and evaluation does not read."""


def write_checkpoint(
    save: Path,
    config: Config,
    weights: Mapping[str, Tensor] | None = None,
    tokenizer: Tokenizer | None = BYTES,
    step: int = 7,
) -> Path:
    """The folder `save` with one checkpoint, of a freshly initialised model where no weights are given."""
    folder = native.begin(save, step)
    save_file(dict(weights or build_model(config).state_dict()), folder / native.WEIGHTS)
    (folder / native.CONFIG).write_text(config.to_yaml())
    (folder / native.META).write_text(json.dumps({"step": step}))
    if tokenizer is not None:
        tokenizer.save(folder / native.TOKENIZER)
    for name in NEEDED:
        (folder / name).parent.mkdir()
        (folder / name).touch()
    native.commit(save, step)
    return save
