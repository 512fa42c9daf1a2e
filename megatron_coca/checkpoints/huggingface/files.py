"""Which file of a Hugging Face folder holds each weight."""

from collections.abc import Iterable
from pathlib import Path

from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.native import read_json
from megatron_coca.checkpoints.weights import names_in

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def weight_files(folder: Path) -> dict[str, Path]:
    """The file of every weight by their names. Raises CheckpointError where there are none that can be read."""
    index = folder / INDEX
    if index.is_file():
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict):
            raise CheckpointError(f"{index}: has no weight_map that says which file holds each weight")
        return {name: folder / file for name, file in files.items()}
    single = folder / SINGLE
    if not single.is_file():
        raise CheckpointError(f"{folder}: no {SINGLE} and no {INDEX} (pickled .bin weights are not read)")
    return dict.fromkeys(names_in(single), single)


def has_t_projection(names: Iterable[str]) -> bool:
    """Whether weights of LLaMA's shape are of the CoCA authors' models, whose key projection is named so."""
    return any(name.endswith("self_attn.t_proj.weight") for name in names)
