"""The README.md of an exported folder: what the model is, how it is loaded, and how it is used on longer texts.

It tells what the configuration and the checkpoint know, and no path of the machine that trained the model.
"""

from math import prod
from typing import Any

from megatron_coca.attention.positions.distance_maps import TRAINING_ONLY
from megatron_coca.checkpoints.exports.exporters import MODELLING_FILE
from megatron_coca.checkpoints.huggingface_families import REMOTE_TYPES
from megatron_coca.checkpoints.load import OpenedCheckpoint
from megatron_coca.checkpoints.weights import Weights
from megatron_coca.config import Config
from megatron_coca.config.position import ROTATED_METHODS

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
COCA = frozenset({"coca", "coca_strict"})
SHAPES = {"llama": "LLaMA", "gpt_neox": "GPT-NeoX"}

REMOTE_NOTE = f"""
`trust_remote_code=True` runs `{MODELLING_FILE.name}` of this folder, which computes the position method; read it before you
allow it. It needs torch and transformers alone. Nothing else in the folder is code. Any `attn_implementation` works
for methods that rotate; a bias or a relative-position map needs `eager` or `sdpa`.
"""
BATCHES = """
Texts of several lengths are padded on the left, by the symbol that ends texts: `tokenizer(texts, padding=True,
return_tensors="pt")`, and pass the mask on, as `**inputs` does. Should the tokenizer have no padding token, set
`tokenizer.pad_token = tokenizer.eos_token`. {alone}
"""
ALONE = "Each text gets what it gets alone."
NOT_ALONE = """**Give it one text at a time:** with `{0}`, transformers extends all texts of a batch by the
longest one, so a short text beside one of more than {1} tokens gets other numbers than alone. `yarn` extends every text
alike, and batches are safe with it."""
BY_THE_LONGEST = frozenset({"dynamic", "longrope"})
"""Extensions for which transformers takes the length of the longest text; the modelling file of ours takes each one's."""
STOCK_NOTE = """
This is a stock architecture: no code but that of transformers is run.
"""
LONGER_REMOTE = """
## Longer texts

The training length is {length} tokens. {present}

```python
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.from_pretrained("{name}", trust_remote_code=True)
config.position["rope_scaling"] = {{"rope_type": "dynamic", "factor": 4.0{original}}}
model = AutoModelForCausalLM.from_pretrained("{name}", config=config, trust_remote_code=True)
```

Each row is extended by its own length, and goes back to the plain frequencies when it is short. While `generate`
extends a sequence, every step sees the length so far. `{{"rope_type": "dynamic_max", "target_length": N}}` sees at least N
tokens at every step, `{{"rope_type": "linear", "factor": s}}` interpolates positions.

{decoding}
"""
LONGER_STOCK = """
## Longer texts

The training length is {length} tokens. {present}

```python
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.from_pretrained("{name}")
config.rope_parameters = config.rope_parameters | {{"rope_type": "dynamic", "factor": 4.0}}
{measured}model = AutoModelForCausalLM.from_pretrained("{name}", config=config)
```

Give a model with dynamic NTK one text at a time: transformers extends a whole batch by its longest text.

{decoding}
"""
LONGER_MAP = """
## Longer texts

The training length is {length} tokens. What is beyond it is the work of `{map}`, the relative-position map in
`config.position`; no extension need be set beside it.
"""
LONGER_TRAINED_MAP = """
## Longer texts

The model was trained at {length} tokens with the map `{map}`, by which training has the distances of longer texts.
It is applied in training mode alone; nothing need be set for longer texts.
"""
LONGER_CLEX = """
## Longer texts

The training length is {length} tokens. Beyond it CLEX gives the frequencies, by an equation that was learned for up to
{clex}; nothing need be set.

{decoding}
"""
DECODING = """Beyond the training length, an extension that depends on the length (dynamic NTK, dynamic YaRN, CLEX) can give other
greedy tokens with `prompt_lookup_num_tokens`, a drafting model or `use_cache=False` than with the cache: cached tokens
keep what was computed at the length of their step, and tokens of one step share a length. Compare outputs that were
decoded in one way."""
NOT_EXTENDED = "Beyond it, set how positions are extended, for example by dynamic NTK:"
EXTENDED = """The folder extends positions by `{0}`. A model that was trained with
it needs it; where it was chosen afterwards, another can be, for example dynamic NTK:"""
CITATION = """
## Citation

```bibtex
@article{zhu2023coca,
  title = {CoCA: Fusing Position Embedding with Collinear Constrained Attention in Transformers for Long Context Window
           Extending},
  author = {Zhu, Shiyi and Ye, Jing and Jiang, Wei and Xue, Siqiao and Zhang, Qi and Wu, Yifan and Li, Jianguo},
  journal = {arXiv preprint arXiv:2309.08646},
  year = {2023}
}
```
"""


def model_card(opened: OpenedCheckpoint, config: Config, kind: str, weights: Weights, name: str) -> str:
    """The card of an export of `opened`, used as `config` says, written as `model_type` `kind` into the folder `name`;
    `weights` are those that are written.
    """
    remote, method = kind in REMOTE_TYPES, config.position.pos_emb
    parts = [
        _front(kind, method),
        f"# {name}\n",
        _facts(opened, config, kind, weights),
        _loading(config, name, remote),
        REMOTE_NOTE if remote else STOCK_NOTE,
        _longer(config, name, remote) if method in ROTATED_METHODS else "",
        CITATION if method in COCA else "",
    ]
    return "\n".join(part.strip("\n") + "\n" for part in parts if part)


def _longer(config: Config, name: str, remote: bool) -> str:
    """How texts beyond the training length are treated by a method that rotates."""
    position = config.position
    scaling, distances = position.rope_scaling, position.relative_positions
    length, original = config.model.seq_length, position.original_length(config.model.seq_length)
    other = original != length
    told = {
        "length": length,
        "original": f', "original_max_position_embeddings": {original}' if other else "",
        # Dynamic scaling of a stock model is measured from this key, whatever length the weights were trained at.
        "measured": f"config.max_position_embeddings = {original}\n" if other else "",
        "name": name,
        "present": NOT_EXTENDED if scaling is None else EXTENDED.format(scaling.rope_type),
        "map": distances.type if distances is not None else None,
        "decoding": DECODING,
        "clex": f"{scaling.max_factor} times {f'{original} tokens' if other else 'that length'}"
        if scaling is not None and scaling.rope_type == "clex"
        else None,
    }
    special = {"map": LONGER_TRAINED_MAP if told["map"] in TRAINING_ONLY else LONGER_MAP, "clex": LONGER_CLEX}
    fitting = (text for key, text in special.items() if told[key] is not None)
    return next(fitting, LONGER_REMOTE if remote else LONGER_STOCK).format(**told)


def _front(kind: str, method: str) -> str:
    tags = [kind, method.replace("_", "-"), *(["custom_code"] if kind in REMOTE_TYPES else [])]
    tags = list(dict.fromkeys(tags + (["coca"] if method in COCA else [])))
    listed = "\n".join(f"- {tag}" for tag in tags)
    return f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n{listed}\n---\n"


def _facts(opened: OpenedCheckpoint, config: Config, kind: str, weights: Weights) -> str:
    model, position = config.model, config.position
    count = sum(prod(entry.shape) for entry in weights.entries.values())
    rows = {
        "architecture": f"a causal language model {_architecture(config, kind)}",
        "positions": METHODS[position.pos_emb],
        "extension": position.rope_scaling.rope_type if position.rope_scaling is not None else None,
        "relative positions": position.relative_positions.type if position.relative_positions is not None else None,
        "logit scaling": position.logit_scaling if position.logit_scaling != "none" else None,
        "training length": f"{model.seq_length:,} tokens",
        "parameters": f"{count:,}",
        "shape": f"{model.num_layers} layers, width {model.hidden_size}, {model.num_attention_heads} heads"
        + (f", {model.num_kv_heads} of keys" if model.num_kv_heads != model.num_attention_heads else ""),
        "vocabulary": f"{model.vocab_size:,} tokens, {model.padded_vocab_size:,} rows" if model.vocab_size else None,
        "weights": str(next(iter(weights.entries.values())).dtype).removeprefix("torch."),
        **_training(opened),
    }
    told = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *told]) + "\n"


def _architecture(config: Config, kind: str) -> str:
    model = config.model
    if kind == "coca_dense":
        residual = "a parallel" if model.gpt_j_residual else "a sequential"
        return f"with {model.norm}, {model.activation} and {residual} residual"
    return f"of {SHAPES[REMOTE_TYPES.get(kind, kind)]} shape"


def _training(opened: OpenedCheckpoint) -> dict[str, Any]:
    """What the run's configuration says of it, where the checkpoint is one of a run."""
    if not opened.step:
        return {}
    config = opened.trained
    batch, rate = config.batch.train_batch_size, config.optimizer.lr
    return {
        "trained for": f"{opened.step:,} steps" + (f" of {batch:,} sequences" if batch else ""),
        "optimizer": config.optimizer.type + (f", peak learning rate {rate:g}" if rate else ""),
        "trained in": config.precision.dtype,
        "trained parts": ", ".join(config.optimizer.trainable) if config.optimizer.trainable else None,
    }


def _alone(config: Config, remote: bool) -> str:
    """Whether a text of a batch gets what it gets alone."""
    scaling = config.position.rope_scaling
    if remote or scaling is None or scaling.rope_type not in BY_THE_LONGEST:
        return ALONE
    return NOT_ALONE.format(scaling.rope_type, config.position.original_length(config.model.seq_length))


def _loading(config: Config, name: str, remote: bool) -> str:
    trust = ", trust_remote_code=True" if remote else ""
    return f"""## Loading

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})

inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
```
{BATCHES.replace("{alone}", _alone(config, remote))}"""
