"""Which file of a Hugging Face folder holds each weight."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.huggingface.pickles import names_in_pickle, open_pickles
from megatron_coca.checkpoints.native import read_json
from megatron_coca.checkpoints.weights import Weights, names_in, open_safetensors

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Format:
    """A kind of weights files: what one alone is called, what tells of several, and how they are read."""

    single: str
    index: str
    names: Callable[[Path], list[str]]
    open: Callable[[Mapping[str, Path], Path], Weights]


FORMATS = (
    Format(SINGLE, INDEX, names_in, open_safetensors),
    Format("pytorch_model.bin", "pytorch_model.bin.index.json", names_in_pickle, open_pickles),
)
"""In order of preference, which is that of transformers; one file goes before several."""


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a folder: the file of each one by its name, file by file, whether an index knows it or not."""

    folder: Path
    format: Format
    by_name: Mapping[str, Path]

    def open(self, names: Iterable[str]) -> Weights:
        """Some of the weights, file by file. Raises CheckpointError."""
        wanted = set(names)
        chosen = {name: path for name, path in self.by_name.items() if name in wanted}
        return self.format.open(chosen, self.folder)

    def place(self, names: Iterable[str]) -> int:
        """The number of the first file that holds one of them; what is read in this order visits each file once."""
        order = list(dict.fromkeys(self.by_name.values()))
        return min((order.index(self.by_name[name]) for name in names if name in self.by_name), default=0)


def weight_files(folder: Path) -> WeightFiles:
    """Find the weights and look into every file for their names.

    Raises:
        CheckpointError: there are none, a file is missing or damaged, or holds more than tensors.
    """
    for kind in FORMATS:
        if (folder / kind.single).is_file():
            return WeightFiles(folder, kind, dict.fromkeys(kind.names(folder / kind.single), folder / kind.single))
        if (folder / kind.index).is_file():
            return WeightFiles(folder, kind, _indexed(folder, kind))
    known = " or ".join(f"{kind.single} or {kind.index}" for kind in FORMATS)
    raise CheckpointError(f"{folder}: has no weights: no {known}")


def _indexed(folder: Path, kind: Format) -> dict[str, Path]:
    """What an index says, and what its files hold besides."""
    index = folder / kind.index
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index}: has no weight_map that says which file holds each weight")
    foreign = [file for file in listed.values() if not isinstance(file, str) or Path(file).name != file]
    if foreign:
        raise CheckpointError(f"{index}: {foreign[0]!r} is no name of a file in the folder")
    missing = Counter(file for file in listed.values() if not (folder / file).is_file())
    if missing:
        told = ", ".join(f"{file} ({count} weights)" for file, count in sorted(missing.items()))
        raise CheckpointError(f"{index}: names files that are missing: {told}; fetch the folder again")
    found = {name: folder / file for file in sorted(set(listed.values())) for name in kind.names(folder / file)}
    return found | {name: folder / file for name, file in listed.items()}


def has_t_projection(names: Iterable[str]) -> bool:
    """Whether weights of LLaMA's shape are of the CoCA authors' models, whose key projection is named so."""
    return any(name.endswith("self_attn.t_proj.weight") for name in names)
