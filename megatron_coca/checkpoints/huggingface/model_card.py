"""Write the model card of an exported folder: facts, how to load the model, and how to use it on longer texts.

The facts come from the configuration and the checkpoint. The card contains no paths from the training machine. Its
template is model_card.md.j2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_coca.checkpoints.huggingface.config_json import OURS
from megatron_coca.checkpoints.huggingface.families import FAMILIES
from megatron_coca.checkpoints.huggingface.families.parts.keys import readable_by_older
from megatron_coca.checkpoints.opened import OpenedCheckpoint
from megatron_coca.checkpoints.weights import Weights
from megatron_coca.config import Config

CARD = "README.md"
TRIED = ("5.23.0", "4.57.6")
"""The transformers 5 and 4 versions that exports were tested with; docs/checkpoints.md describes the test."""
SHAPES = {"llama": "LLaMA", "gpt_neox": "GPT-NeoX"}
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=StrictUndefined,
)


@dataclass(frozen=True)
class CardNotes:
    """Facts for a model card that a checkpoint does not contain.

    Attributes:
        licence: the licence's identifier on the Hugging Face Hub.
        base_model: the model on the Hub that training started from.
        results: Markdown text of the section "Results".
    """

    licence: str | None = None
    base_model: str | None = None
    results: str | None = None


def model_card(
    opened: OpenedCheckpoint,
    config: Config,
    settings: Mapping[str, Any],
    weights: Weights,
    name: str,
    notes: CardNotes,
    ends: Sequence[int] = (),
) -> str:
    """Return the model card for an export of `opened` into the folder `name`.

    `config` includes the overrides of the export, `settings` is the content of config.json, `weights` are the exported
    weights, and `ends` are the token ids that end a text.
    """
    kind = str(settings["model_type"])
    position, length, family = config.position, config.model.seq_length, FAMILIES.get(kind)
    remote, coca = kind == OURS, position.pos_emb.startswith("coca")
    facts = _facts(opened, config, kind, weights)
    scaling, distance_map = facts["extension"], facts["relative positions"]
    tags = [kind, position.pos_emb.replace("_", "-"), *["custom_code"] * remote, *["coca"] * coca]
    return TEMPLATES.get_template("model_card.md.j2").render(
        tags=list(dict.fromkeys(tags)),
        name=name,
        notes=notes,
        ends=ends,
        facts=facts,
        trust=", trust_remote_code=True" if remote else "",
        by_the_longest=not remote and position.extension.stock.by_longest,
        scaling=scaling,
        max_factor=getattr(position.rope_scaling, "max_factor", None),
        length=length,
        original=position.original_length(length),
        remote=remote,
        by_type=family is not None and family.by_type is not None,
        tried=TRIED,
        architecture=settings["architectures"][0],
        in_older=family is None or readable_by_older(family, settings),
        eager=family is not None and settings.get("attn_logit_softcapping") is not None,
        rotates=position.embedding.rotary,
        map=distance_map,
        training_map=position.distance_map is not None and position.distance_map.training_only,
        coca=coca,
    )


def _facts(opened: OpenedCheckpoint, config: Config, kind: str, weights: Weights) -> dict[str, Any]:
    model, position, trained = config.model, config.position, opened.trained
    residual = "a parallel" if model.gpt_j_residual else "a sequential"
    architecture = f"with {model.norm}, {model.activation} and {residual} residual"
    if kind != OURS:
        architecture = f"with the {SHAPES.get(kind, kind)} architecture"
    grouped = f", {model.num_kv_heads} key-value heads" if model.num_kv_heads != model.num_attention_heads else ""
    facts = {
        "architecture": f"a causal language model {architecture}",
        "positions": position.embedding.description,
        "rotary frequencies": position.frequencies.label if position.frequencies is not None else None,
        "extension": position.rope_scaling.rope_type if position.rope_scaling is not None else None,
        "relative positions": position.relative_positions.type if position.relative_positions is not None else None,
        "logit scaling": position.scaling.name if position.scaling.name != "none" else None,
        "method sources": "; ".join(
            choice.source for choice, _ in position.choices() if choice.name not in ("none", "default")
        ),
        "training length": f"{model.seq_length:,} tokens",
        "parameters": f"{sum(prod(entry.shape) for entry in weights.entries.values()):,}",
        "shape": f"{model.num_layers} layers, width {model.hidden_size}, {model.num_attention_heads} heads{grouped}",
        "vocabulary": f"{model.vocab_size:,} tokens, {model.padded_vocab_size:,} rows" if model.vocab_size else None,
        "weights": str(next(iter(weights.entries.values())).dtype).removeprefix("torch."),
    }
    if not opened.step:  # not saved by a training run
        return facts
    batch, rate, optimizer = trained.batch.train_batch_size, trained.optimizer.lr, trained.optimizer
    return facts | {
        "trained for": f"{opened.step:,} steps" + (f" of {batch:,} sequences" if batch else ""),
        "optimizer": optimizer.type + (f", peak learning rate {rate:g}" if rate else ""),
        "trained in": trained.precision.dtype,
        "trained parts": ", ".join(optimizer.trainable) if optimizer.trainable else None,
    }
