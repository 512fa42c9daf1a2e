"""Detect PEFT adapters in a folder. Transformers applies them when it loads the folder, so they change the model."""

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from megatron_coca.checkpoints.files import CheckpointError, read_json
from megatron_coca.checkpoints.huggingface.read import GENERATION
from megatron_coca.checkpoints.huggingface.tokenizer_files import own_files
from megatron_coca.checkpoints.weights import load_pickle, read_layout
from megatron_coca.data.tokenizers import end_tokens

CONFIG = "adapter_config.json"
PATTERN = "adapter_model*"
BESIDE = ("trainable_params.bin", "non_lora_trainables.bin")
"""Files of LongLoRA and LLaVA with weights that were trained as a whole. peft does not read them."""
WRAPPED = "base_model.model."
"""The prefix that peft adds to the name of a weight of the base model."""
EMBEDDINGS = re.compile(
    r"(embed_tokens|embed_in|wte|word_embeddings|tok_embeddings|lm_head|embed_out)(\.base_layer)?\.weight$"
)
"""Names of weights with a row for each token, as peft stores them."""
TOKENIZER_FILES = frozenset(end_tokens.TOKENIZER_FILES) - {GENERATION}
MODELS = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json"})
"""Files that contain a tokenizer's vocabulary."""


def check_no_adapters(folder: Path) -> None:
    """Raise CheckpointError if a folder has PEFT adapters. The message contains the commands that merge them."""
    described = os.path.isfile(folder / CONFIG)
    found = [CONFIG] * described + sorted(path.name for path in folder.glob(PATTERN) if os.path.isfile(path))
    if not found:
        return
    if not described:
        raise CheckpointError(
            f"{folder}: has {found[0]} but no {CONFIG}, which describes it; add {CONFIG}, or move {found[0]} elsewhere"
        )
    raise CheckpointError(
        f"{folder}: has PEFT adapters ({', '.join(found)}), which only transformers applies; merge them into their "
        "base model, and use the merged folder:\n" + "\n".join(f"    {line}" for line in merging_lines(folder))
    )


def merging_lines(folder: Path) -> list[str]:
    """Return the shell commands that merge the adapters in a folder into the base model and save FOLDER-merged.

    They also apply weights that were trained beside the adapters (`BESIDE`), give the embeddings the number of rows
    that the adapters were trained with, and save a tokenizer. Raises CheckpointError if a file of the folder is
    damaged, or if a tokenizer file is a link that leads out of the folder.
    """
    named = read_json(folder / CONFIG).get("base_model_name_or_path")
    within = not isinstance(named, str) or not named or Path(named).resolve() == folder.resolve()
    base, adapters, merged = str(folder if within else named), str(folder), f"{folder}-merged"
    beside = [folder / name for name in BESIDE if os.path.isfile(folder / name)]
    lines = []
    if within:  # transformers would apply adapters beside the base model when it loads the base model
        adapters = f"{folder}-adapters"
        lines += [
            f"mkdir {shlex.quote(adapters)}",
            f"mv {shlex.quote(str(folder))}/adapter_* {shlex.quote(adapters)}",
        ]
    steps = [
        "from peft import PeftModel as P",
        "from transformers import AutoModelForCausalLM as M",
        f"m = M.from_pretrained({base!r})",
        *(f"m.resize_token_embeddings({rows})" for rows in _embedding_rows(folder, beside)),
    ]
    for path in beside:
        steps += [
            f"import torch; t = torch.load({str(path)!r}, weights_only=True)",
            f"t = {{n.removeprefix({WRAPPED!r}): w for n, w in t.items()}}",
            "u = m.load_state_dict(t, strict=False).unexpected_keys; assert not u, u",
        ]
    steps.append(f"P.from_pretrained(m, {adapters!r}).merge_and_unload().save_pretrained({merged!r})")
    copied = []
    for place in (folder,) if within or _tokenizer_files(folder) & MODELS else (Path(base), folder):
        if place.is_dir():
            paths = [str(place / name) for name in sorted(_tokenizer_files(place))]
            copied += [shlex.join(["cp", *paths, merged])] if paths else []
        else:  # a model on the Hub
            patterns = sorted(TOKENIZER_FILES)
            steps.append(f"from huggingface_hub import snapshot_download as D; D({base!r}, allow_patterns={patterns}")
            steps[-1] += f", local_dir={merged!r})"
    return [*lines, f"python -c {shlex.quote('; '.join(steps))}", *copied]


def _tokenizer_files(folder: Path) -> set[str]:
    """Return the names of the tokenizer files in a folder. Raises CheckpointError for a link that leads out of it."""
    return own_files(folder).files.keys() & TOKENIZER_FILES


def _embedding_rows(folder: Path, beside: Iterable[Path]) -> set[int]:
    """Return the number of rows of the embeddings that were trained as a whole, as a set: empty if there are none.

    Adapters fit only a model whose vocabulary has the same size. Raises CheckpointError.
    """
    shapes: dict[str, Sequence[int]] = {}
    for path in (*folder.glob(PATTERN), *beside):
        if path.suffix == ".safetensors":
            shapes |= {name: entry.shape for name, entry in read_layout(path).items()}
        elif os.path.isfile(path):
            shapes |= {name: weight.shape for name, weight in load_pickle(path).items() if isinstance(weight, Tensor)}
    return {shape[0] for name, shape in shapes.items() if EMBEDDINGS.search(name) and shape}
