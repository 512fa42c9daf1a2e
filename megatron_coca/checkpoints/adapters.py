"""Find the model that the PEFT adapters in a folder change.

`huggingface/adapted.py` reads the adapters. Some adapters can be applied only by peft. For these, `merging_lines`
returns the shell commands that merge them.
"""

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from megatron_coca.checkpoints.files import CheckpointError, read_json
from megatron_coca.checkpoints.huggingface.adapted import (
    BESIDE,
    MODELS,
    SETTINGS,
    TOKENIZER_FILES,
    WRAPPED,
    Adapters,
    UnsupportedAdapters,
    read_adapters,
)
from megatron_coca.checkpoints.huggingface.gguf.gguf_file import gguf_files
from megatron_coca.checkpoints.huggingface.read import has_weights, is_huggingface_folder
from megatron_coca.checkpoints.huggingface.tokenizer_files import own_files
from megatron_coca.checkpoints.weights import load_pickle, read_layout

PATTERN = "adapter_model*"
EMBEDDINGS = re.compile(
    r"(embed_tokens|embed_in|wte|word_embeddings|tok_embeddings|lm_head|embed_out)(\.base_layer)?\.weight$"
)
"""Pattern of the names under which peft stores embeddings and output heads, the weights with one row per token."""


def has_adapters(folder: Path) -> bool:
    """Return whether a folder has PEFT adapters. Raises CheckpointError if they lack their adapter_config.json."""
    described = os.path.isfile(folder / SETTINGS)
    found = sorted(path.name for path in folder.glob(PATTERN) if os.path.isfile(path))
    if found and not described:
        raise CheckpointError(
            f"{folder}: has {found[0]} but no {SETTINGS}, which describes it; add {SETTINGS}, or move {found[0]} "
            "elsewhere"
        )
    return described


def find_adapters(folder: Path, base: Path | None) -> tuple[Adapters, Path]:
    """Return the adapters in `folder` and the folder of the model that they change. `folder` must have adapters.

    `base` is the folder of that model if the user named it. If it is None, the model must be beside the adapters. The
    model that adapter_config.json names is not opened, because that name is a place on the computer on which the
    adapters were trained. Raises CheckpointError.
    """
    try:
        adapters = read_adapters(folder)
    except UnsupportedAdapters as error:
        raise CheckpointError(
            f"{folder}: has PEFT adapters that only peft can apply ({error}); merge them into their base model, and "
            "use the merged folder:\n" + "\n".join(f"    {line}" for line in merging_lines(folder))
        ) from error
    if base is None and not has_weights(folder) and not gguf_files(folder):
        named = adapters.settings.get("base_model_name_or_path")
        trained = f" (they were trained on {named!r:.200})" if named else ""
        raise CheckpointError(
            f"{folder}: has PEFT adapters, but not the model that they change{trained}; name its folder with "
            "--base FOLDER, or in a file with base_model: FOLDER"
        )
    found = base or folder
    if found.resolve() != folder.resolve() and has_adapters(found):
        raise CheckpointError(
            f"base_model: {found}: has PEFT adapters of its own; name the folder of a model without adapters, which "
            "`megatron-coca export huggingface` writes"
        )
    if not is_huggingface_folder(found):
        raise CheckpointError(
            f"base_model: {found}: is not a Hugging Face folder or GGUF file; name the model that {folder} was trained "
            "on"
        )
    return adapters, found


def merging_lines(folder: Path) -> list[str]:
    """Return the shell commands that merge the adapters in FOLDER into the base model and save it in FOLDER-merged.

    The commands also apply weights that were trained beside the adapters (`BESIDE`), resize the embeddings to the
    number of rows that the adapters were trained with, and save a tokenizer. Raises CheckpointError if a file of the
    folder is damaged, or if a tokenizer file is a link that leads out of the folder.
    """
    named = read_json(folder / SETTINGS).get("base_model_name_or_path")
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
    """Return the distinct row counts of the embeddings that were trained as a whole.

    The adapters fit only a model whose embedding has that many rows. Raises CheckpointError.
    """
    shapes: dict[str, Sequence[int]] = {}
    for path in (*folder.glob(PATTERN), *beside):
        if path.suffix == ".safetensors":
            shapes |= {name: entry.shape for name, entry in read_layout(path).items()}
        elif os.path.isfile(path):
            shapes |= {name: weight.shape for name, weight in load_pickle(path).items() if isinstance(weight, Tensor)}
    return {shape[0] for name, shape in shapes.items() if EMBEDDINGS.search(name) and shape}
