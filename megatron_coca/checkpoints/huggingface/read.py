"""Open Hugging Face folders: find the weight files and read the weights. `config_json.py` reads the configuration."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_coca.checkpoints.files import CheckpointError, read_json, read_json_if_present
from megatron_coca.checkpoints.huggingface import families, weight_map
from megatron_coca.checkpoints.huggingface.config_json import CONFIG, READERS, UNNEEDED, may_be_coca, parse_config
from megatron_coca.checkpoints.identity import pickles_identity, tensors_identity
from megatron_coca.checkpoints.opened import OpenedCheckpoint
from megatron_coca.checkpoints.weights import Weights, names_in, names_in_pickle, open_pickles, open_safetensors
from megatron_coca.config import Config

GENERATION = "generation_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def is_huggingface_folder(path: Path) -> bool:
    """Return whether `path` contains a config.json."""
    return os.path.isfile(path / CONFIG)  # unlike Path.is_file, returns False for file system errors


def read_config(folder: Path) -> Config:
    """Read the configuration of the model in `folder`.

    CoCA is recognized in LLaMA folders by the weights named `t_proj`, and in exported folders by config.json. GPT-NeoX
    folders by CoCA's authors cannot be distinguished from RoPE models and need the override pos_emb=coca. Raises
    CheckpointError if config.json or the weight files are invalid, or if they describe an unsupported model.
    """
    source = folder / CONFIG
    generation = read_json_if_present(folder / GENERATION)
    return parse_config(read_json(source), source, generation, lambda: find_weights(folder)[1])


# Weights --------------------------------------------------------------------------------------------------------------


class WeightFormat(NamedTuple):
    """A weight file format: names of a single file and of the index of several files, and functions that read them."""

    single_file: str
    index_file: str
    names: Callable[[Path], list[str]]
    open: Callable[[Mapping[str, Path], Path], Weights]


FORMATS = (
    WeightFormat(SINGLE, INDEX, names_in, open_safetensors),
    WeightFormat("pytorch_model.bin", "pytorch_model.bin.index.json", names_in_pickle, open_pickles),
)
"""Weight file formats in transformers' order of preference. A single file takes precedence over several files."""

HEAD, EMBEDDING = "final_linear.weight", "embedding.word_embeddings.weight"
"""Our names of the weights that have a row for each token. A tied head is the same weight as the embedding."""
OPTIONAL = re.compile(r".*\.bias|.*position.*")
"""Pattern of our names of weights that only some models of an architecture have."""
NAMED = 5
"""Maximum number of weights that a message names."""


def find_weights(folder: Path) -> tuple[WeightFormat, dict[str, Path]]:
    """Return the weight file format and the file of each weight, including weights that the index does not list.

    Raises CheckpointError if there are no weight files, or if a file is missing, damaged or contains other objects than
    tensors.
    """
    for kind in FORMATS:
        if (folder / kind.single_file).is_file():
            return kind, dict.fromkeys(kind.names(folder / kind.single_file), folder / kind.single_file)
        if (folder / kind.index_file).is_file():
            return kind, _indexed(folder, kind)
    known = " or ".join(f"{kind.single_file} or {kind.index_file}" for kind in FORMATS)
    raise CheckpointError(f"{folder}: no weights found (no {known}); download the folder again")


def _indexed(folder: Path, kind: WeightFormat) -> dict[str, Path]:
    index = folder / kind.index_file
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index}: weight_map is missing; download the folder again")
    outside = [file for file in listed.values() if not isinstance(file, str) or Path(file).name != file]
    if outside:
        raise CheckpointError(f"{index}: {outside[0]!r} is not a file name in the folder; download the folder again")
    missing = Counter(file for file in listed.values() if not (folder / file).is_file())
    if missing:
        files = ", ".join(f"{file} ({count} weights)" for file, count in sorted(missing.items()))
        raise CheckpointError(f"{index}: lists files that do not exist ({files}); download the folder again")
    present = {name: folder / file for file in sorted(set(listed.values())) for name in kind.names(folder / file)}
    return present | {name: folder / file for name, file in listed.items()}


def open_weights(folder: Path, trained: Config) -> Weights:
    """Open the weights of a model under our names, in the dtype on disk and in the order of the files. `trained` is its
    configuration.

    Raises CheckpointError if a weight is missing, or if the folder has a weight that the model does not have.
    """
    model, config, (kind, files) = trained.model, read_json(folder / CONFIG), find_weights(folder)
    kind_of_model = str(config["model_type"])
    if family := families.FAMILIES.get(kind_of_model):
        table, unneeded = family.rows(model), UNNEEDED
    else:
        table, unneeded = READERS[kind_of_model].rows(config, files), READERS[kind_of_model].unneeded
    heads, tied = weight_map.heads_of(trained), not model.no_weight_tying

    def open_files(names: Iterable[str]) -> Weights:
        chosen = set(names)
        return kind.open({name: path for name, path in files.items() if name in chosen}, folder)

    rows = weight_map.expand(table, model.num_layers)
    if not any(name in files for row in rows for name in row.theirs):  # saved from a class without an output head
        rows = [replace(row, theirs=tuple(name.partition(".")[2] for name in row.theirs)) for row in rows]
    wanted = [row for row in rows if not OPTIONAL.fullmatch(row.ours) or any(name in files for name in row.theirs)]
    if tied:
        wanted = [row for row in wanted if row.ours != HEAD]
        names = {row.ours: row.theirs[0] for row in rows if row.ours in (HEAD, EMBEDDING)}
        if files.keys() >= set(names.values()):  # the folder may contain a tied head if it equals the embedding
            both = open_files(names.values())
            if not torch.equal(both.read(names[HEAD]), both.read(names[EMBEDDING])):
                raise CheckpointError(
                    f"{folder}: {names[HEAD]} differs from {names[EMBEDDING]}, but {CONFIG} ties these weights; set "
                    f"tie_word_embeddings to false in {CONFIG}"
                )
    order = {path: number for number, path in enumerate(dict.fromkeys(files.values()))}
    wanted.sort(key=lambda row: min((order[files[name]] for name in row.theirs if name in files), default=0))
    weights = weight_map.joined(open_files(name for row in wanted for name in row.theirs), wanted, heads)
    read = {name for row in rows for name in row.theirs}
    unread = sorted(name for name in files if name not in read and not unneeded.fullmatch(name))
    if unread:
        more = f" and {len(unread) - NAMED} more" if len(unread) > NAMED else ""
        raise CheckpointError(
            f"{folder}: has weights that the model described by {CONFIG} does not have "
            f"({', '.join(unread[:NAMED])}{more}); correct {CONFIG}"
        )
    return weights


def open_folder(folder: Path) -> OpenedCheckpoint:
    """Open a Hugging Face folder. Raises CheckpointError."""
    trained = read_config(folder)
    guessed = {}
    if may_be_coca(read_json(folder / CONFIG)):
        guessed["pos_emb"] = (
            f"{folder}: using pos_emb=rotary, but a GPT-NeoX model by CoCA's authors would have the same config.json; "
            "override with pos_emb=coca if the model is theirs, or else with pos_emb=rotary"
        )
    return OpenedCheckpoint(
        folder=folder,
        trained=trained,
        tokenizer_folder=None,
        step=None,
        identify=partial(_identity, folder, trained),
        weights=partial(open_weights, folder, trained),
        also_free=frozenset({"pos_emb"}),
        guessed=guessed,
    )


def _identity(folder: Path, config: Config) -> str:
    kind, files = find_weights(folder)
    if kind.single_file == SINGLE:
        return tensors_identity(config, files)
    return pickles_identity(config, set(files.values()))
