"""Write the README.md of an exported folder: what the model is, how it is loaded, and how it is used on longer texts.

It says what the configuration and the checkpoint contain, and no path of the machine that trained the model. The text
is in model_card.md.j2.
"""

from math import prod
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_coca.attention.positions.distance_maps import TRAINING_ONLY
from megatron_coca.checkpoints.huggingface import REMOTE_TYPES
from megatron_coca.checkpoints.load import OpenedCheckpoint
from megatron_coca.checkpoints.weights import Weights
from megatron_coca.config import Config
from megatron_coca.config.model import ROTATED_METHODS

CARD = "README.md"
METHODS = {
    "rotary": "rotary position embedding (RoPE)",
    "coca": "Collinear Constrained Attention (CoCA), in the form that its paper trains",
    "coca_strict": "Collinear Constrained Attention (CoCA), with the constraint on queries too",
    "xpos": "xPos",
    "alibi": "ALiBi",
    "kerple_log": "KERPLE, logarithmic",
    "kerple_power": "KERPLE, power",
    "rpe": "T5's relative position bias",
    "learned": "learned absolute positions",
    "sinusoidal": "sinusoidal absolute positions",
    "none": "no position encoding",
}
SHAPES = {"llama": "LLaMA", "gpt_neox": "GPT-NeoX"}
BY_THE_LONGEST = frozenset({"dynamic", "longrope"})
"""Extensions for which transformers takes the length of the longest text; our modelling file takes each one's."""


def model_card(opened: OpenedCheckpoint, config: Config, kind: str, weights: Weights, name: str) -> str:
    """Return the card of an export of `opened` as `model_type` `kind` into the folder `name`.

    `config` has the overrides of the export; `weights` are those that are written.
    """
    position, length = config.position, config.model.seq_length
    remote, coca = kind in REMOTE_TYPES, position.pos_emb.startswith("coca")
    facts = _facts(opened, config, kind, weights)
    scaling, distance_map = facts["extension"], facts["relative positions"]
    tags = [kind, position.pos_emb.replace("_", "-"), *["custom_code"] * remote, *["coca"] * coca]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("model_card.md.j2").render(
        tags=list(dict.fromkeys(tags)),
        name=name,
        facts=facts,
        trust=", trust_remote_code=True" if remote else "",
        by_the_longest=not remote and scaling in BY_THE_LONGEST,
        scaling=scaling,
        max_factor=position.rope_scaling.max_factor if position.rope_scaling is not None else None,
        length=length,
        original=position.original_length(length),
        remote=remote,
        rotates=position.pos_emb in ROTATED_METHODS,
        map=distance_map,
        training_map=distance_map in TRAINING_ONLY,
        coca=coca,
    )


def _facts(opened: OpenedCheckpoint, config: Config, kind: str, weights: Weights) -> dict[str, Any]:
    model, position, trained = config.model, config.position, opened.trained
    residual = "a parallel" if model.gpt_j_residual else "a sequential"
    architecture = f"with {model.norm}, {model.activation} and {residual} residual"
    if kind != "coca_dense":
        architecture = f"of {SHAPES[REMOTE_TYPES.get(kind, kind)]} shape"
    grouped = f", {model.num_kv_heads} of keys" if model.num_kv_heads != model.num_attention_heads else ""
    facts = {
        "architecture": f"a causal language model {architecture}",
        "positions": METHODS[position.pos_emb],
        "extension": position.rope_scaling.rope_type if position.rope_scaling is not None else None,
        "relative positions": position.relative_positions.type if position.relative_positions is not None else None,
        "logit scaling": position.logit_scaling if position.logit_scaling != "none" else None,
        "training length": f"{model.seq_length:,} tokens",
        "parameters": f"{sum(prod(entry.shape) for entry in weights.entries.values()):,}",
        "shape": f"{model.num_layers} layers, width {model.hidden_size}, {model.num_attention_heads} heads{grouped}",
        "vocabulary": f"{model.vocab_size:,} tokens, {model.padded_vocab_size:,} rows" if model.vocab_size else None,
        "weights": str(next(iter(weights.entries.values())).dtype).removeprefix("torch."),
    }
    if not opened.step:  # not the checkpoint of a run
        return facts
    batch, rate, optimizer = trained.batch.train_batch_size, trained.optimizer.lr, trained.optimizer
    return facts | {
        "trained for": f"{opened.step:,} steps" + (f" of {batch:,} sequences" if batch else ""),
        "optimizer": optimizer.type + (f", peak learning rate {rate:g}" if rate else ""),
        "trained in": trained.precision.dtype,
        "trained parts": ", ".join(optimizer.trainable) if optimizer.trainable else None,
    }
