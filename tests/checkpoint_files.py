"""Write checkpoints without training, in the format of training, for tests of the code that reads them."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.native.state import StateReader
from megatron_coca.config import Config
from megatron_coca.data import Tokenizer, load_tokenizer
from megatron_coca.model import GPT, build_model

BYTES = load_tokenizer("CharLevelTokenizer")
TINY = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 16,
    "vocab_size": 512,
    "no_weight_tying": True,
    "tokenizer_type": "CharLevelTokenizer",
    "pos_emb": "coca",
}
"""A model for tests of generation."""
NEEDED = ("state/rank_00000.safetensors", "rng/rank_0.pt")
"""What a complete checkpoint has besides, and evaluation does not read."""


def write_checkpoint(
    save: Path,
    config: Config,
    weights: Mapping[str, Tensor] | None = None,
    tokenizer: Tokenizer | None = BYTES,
    step: int = 7,
    **meta: Any,
) -> Path:
    """The folder `save` with one checkpoint, of a freshly initialised model where no weights are given."""
    folder = native.begin(save, step)
    save_file(dict(weights or build_model(config).state_dict()), folder / native.WEIGHTS)
    (folder / native.CONFIG).write_text(config.to_yaml())
    (folder / native.META).write_text(json.dumps({"step": step} | meta))
    if tokenizer is not None:
        tokenizer.save(folder / native.TOKENIZER)
    for name in NEEDED:
        (folder / name).parent.mkdir()
        (folder / name).touch()
    save_file({}, folder / NEEDED[0], {"places": "{}"})
    native.commit(save, step)
    return save


def write_trained_adapters(
    model: str | Path, save: Path, lora: dict[str, Any], dtype: torch.dtype = torch.float32, **keys: Any
) -> GPT:
    """Write a checkpoint with random adapters of the model in a folder, as a run leaves it. Returns the module that
    trains, with the same weights in `dtype`.
    """
    from megatron_coca.checkpoints import open_checkpoint
    from megatron_coca.checkpoints.importing import starting_config
    from megatron_coca.training.adapters import add_adapters
    from megatron_coca.training.checkpointing.initial_model import initial_model
    from megatron_coca.training.engine.state import saved_names

    config = starting_config(model, {"lora": lora, "train_micro_batch_size_per_gpu": 1} | keys)
    module, _, adapts = initial_model(config, "cpu")
    module = module.to(dtype)
    state, exact = module.state_dict(), open_checkpoint(model).weights()
    for name in state.keys() & exact.entries.keys():  # in `dtype`, not in that of the run
        state[name].copy_(exact.read(name))
    assert config.optimizer.lora is not None and adapts is not None
    add_adapters(module, config.optimizer.lora, 5)
    torch.manual_seed(1)
    names = saved_names(module, True)
    with torch.no_grad():
        for weight in names:
            weight += 0.2 * torch.randn(weight.shape, dtype=dtype)
    weights = {name: weight.detach() for weight, name in names.items()}
    write_checkpoint(save, config, weights, None, adapts=adapts.model_dump())
    return module.eval()


def beginning_tokenizer(folder: Path, ids: int = 97) -> Tokenizer:
    """A tokenizer of letters whose library puts `<bos>`, id 0, before every text; `<eos>` is 1."""
    symbols = ["<bos>", "<eos>", *(chr(number) for number in range(32, 30 + ids))]
    words = tokenizers.models.WordLevel({symbol: number for number, symbol in enumerate(symbols)}, unk_token=" ")
    model = tokenizers.Tokenizer(words)
    model.add_special_tokens(symbols[:2])
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    model.post_processor = tokenizers.processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 0)])
    model.save(str(folder / "tokenizer.json"))
    return load_tokenizer("HFTokenizer", folder)


def open_state(folder: Path) -> StateReader:
    """All files of ranks in a folder of state that no manifest describes."""
    return StateReader(folder, [path.name for path in folder.glob("rank_*.safetensors")])


def run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let training code run in this process as the only rank, without a process group."""
    engine = "megatron_coca.training.engine.group"
    for name, answer in (("is_main", True), ("rank", 0), ("background_group", None), ("world_size", 1)):
        monkeypatch.setattr(f"{engine}.{name}", lambda answer=answer: answer)
    monkeypatch.setattr(f"{engine}.everyone_succeeded", lambda succeeded, group=None: succeeded)
    monkeypatch.setattr(f"{engine}.anyone", lambda flags, group=None: tuple(flags))
    monkeypatch.setattr(f"{engine}.merge_dicts", lambda mine, group: mine)
    for name in ("broadcast_text", "sum_over_ranks"):
        monkeypatch.setattr(f"{engine}.{name}", lambda mine: mine)
    for name in ("gather_texts", "gather_floats"):
        monkeypatch.setattr(f"{engine}.{name}", lambda mine, group=None: [mine])


def refuse(monkeypatch: pytest.MonkeyPatch, path: Path, method: str, number: int) -> None:
    """Let a method of `Path` that reads fail on one path, as the file system would with the error `number`."""
    original = getattr(Path, method)

    def guarded(self: Path, *arguments: Any, **keywords: Any) -> Any:
        if self == path:
            raise OSError(number, os.strerror(number), str(path))
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(Path, method, guarded)


def talkative_model(config: Config) -> GPT:
    """A model in evaluation mode whose greedy texts depend on the prompt, mostly in ASCII with `BYTES`."""
    model, generator = build_model(config, training=False).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        assert model.final_linear is not None, "set no_weight_tying: a tied model mostly repeats its last token"
        model.final_linear.weight[32:127] *= 3.0
    return model
