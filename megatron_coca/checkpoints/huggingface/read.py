"""Open Hugging Face folders: find the weight files and read the weights. `config_json.py` reads the configuration."""

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_coca.checkpoints.files import CheckpointError, read_json, read_json_if_present
from megatron_coca.checkpoints.huggingface import families, quantized, weight_map
from megatron_coca.checkpoints.huggingface.config_json import CONFIG, READERS, UNNEEDED, parse_config
from megatron_coca.checkpoints.huggingface.families.gpt_neox import may_be_coca
from megatron_coca.checkpoints.huggingface.gguf.gguf_file import HEADS, GgufFile, find_gguf, gguf_files
from megatron_coca.checkpoints.huggingface.other_saves import empty_weights, other_save, without_wrappers
from megatron_coca.checkpoints.huggingface.wrappers import EMBEDDING as ROWS_OF
from megatron_coca.checkpoints.huggingface.wrappers import TEXT, Network, find_network
from megatron_coca.checkpoints.identity import (
    pickled_digests,
    pickles_identity,
    stored_digests,
    stored_identity,
    tensors_identity,
    with_ignored,
)
from megatron_coca.checkpoints.opened import OpenedCheckpoint
from megatron_coca.checkpoints.weights import Weights, names_in, names_in_pickle, open_pickles, open_safetensors
from megatron_coca.config import Config
from megatron_coca.support.arguments import GGUF

logger = logging.getLogger(__name__)
GENERATION = "generation_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def is_huggingface_folder(path: Path) -> bool:
    """Return whether `path` is a GGUF file, or contains a config.json or GGUF files."""
    if os.path.isfile(path / CONFIG):  # unlike Path.is_file, returns False for file system errors
        return True
    return (path.suffix == GGUF and os.path.isfile(path)) or bool(gguf_files(path))


# Weights --------------------------------------------------------------------------------------------------------------


class WeightFormat(NamedTuple):
    """A weight file format: names of a single file and of the index of several files, and functions that read them.

    `digests` returns a digest of each tensor in a file.
    """

    single_file: str
    index_file: str
    names: Callable[[Path], list[str]]
    open: Callable[[Mapping[str, Path], Path], Weights]
    digests: Callable[[Path], dict[str, str]]


FORMATS = (
    WeightFormat(SINGLE, INDEX, names_in, open_safetensors, stored_digests),
    WeightFormat("pytorch_model.bin", "pytorch_model.bin.index.json", names_in_pickle, open_pickles, pickled_digests),
)
"""Weight file formats in transformers' order of preference. A single file takes precedence over several files."""

HEAD, EMBEDDING = "final_linear.weight", "embedding.word_embeddings.weight"
"""Our names of the weights that have a row for each token. A tied head is the same weight as the embedding."""
OPTIONAL = re.compile(r".*\.bias|.*position.*")
"""Pattern of our names of weights that only some models of an architecture have."""
NAMED = 5
"""Maximum number of weights that a message names."""
BIASES = "biases follow from use_bias_in_norms, use_bias_in_qkv, use_bias_in_attn_linear and use_bias_in_mlp"


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weight files of a known format, apart from GGUF files."""
    return any((folder / name).is_file() for kind in FORMATS for name in (kind.single_file, kind.index_file))


def find_weights(folder: Path) -> tuple[WeightFormat, dict[str, Path]]:
    """Return the weight file format and the file of each weight, including weights that the index does not list.

    Raises CheckpointError if there are no weight files, if a file is missing, damaged or contains other objects than
    tensors, or if a single file and several files of the same format contain different weights.
    """
    for kind in FORMATS:
        if (folder / kind.single_file).is_file():
            _check_same(folder, kind)
            return kind, dict.fromkeys(kind.names(folder / kind.single_file), folder / kind.single_file)
        if (folder / kind.index_file).is_file():
            return kind, _indexed(folder, kind)
    known = " or ".join(f"{kind.single_file} or {kind.index_file}" for kind in FORMATS)
    raise CheckpointError(
        f"{folder}: no weights found (no {known}); {other_save(folder) or 'download the folder again'}"
    )


def _check_same(folder: Path, kind: WeightFormat) -> None:
    """Raise CheckpointError if the files that an index lists contain other weights than the single file beside it.

    A save may leave files of an earlier save in the folder. Large tensors are compared by samples (`identity.py`),
    which is enough for trained weights, because training changes nearly all values.
    """
    if not (folder / kind.index_file).is_file():
        return
    listed = read_json(folder / kind.index_file).get("weight_map")
    names = {str(file) for file in listed.values()} if isinstance(listed, dict) else set()
    shards = [folder / name for name in sorted(names - {kind.single_file}) if Path(name).name == name]
    present = [path for path in shards if path.is_file()]
    if not present:
        return
    whole, parts = kind.digests(folder / kind.single_file), dict[str, str]()
    for path in present:
        parts |= kind.digests(path)
    compared = {*parts} if present != shards else parts.keys() | whole.keys()
    differing = sorted(name for name in compared if parts.get(name) != whole.get(name))
    if differing:
        raise CheckpointError(
            f"{folder}: {kind.single_file} and the files of {kind.index_file} contain different weights ("
            f"{len(differing)} of {len(compared)}, for example {differing[0]}); move the older ones out of the folder"
        )


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


def read_config(folder: Path) -> Config:
    """Read the configuration of the model in `folder`.

    CoCA is recognized in LLaMA folders by the weights named `t_proj`, and in exported folders by config.json. GPT-NeoX
    folders by CoCA's authors cannot be distinguished from RoPE models and need the override pos_emb=coca. Raises
    CheckpointError if config.json or the weight files are invalid, or if they describe an unsupported model.
    """
    return Folder(folder).config


def gguf_formats(folder: Path) -> Counter[str]:
    """Return the number of tensors in each format of the GGUF file at `folder`. Raises CheckpointError.

    The result is empty if the weights at `folder` are not read from a GGUF file.
    """
    gguf = Folder(folder).gguf
    return Counter() if gguf is None else Counter(tensor.tensor_type.name for tensor in gguf.tensors.values())


class Folder:
    """The text network in a Hugging Face folder or a GGUF file, read on first use. Reading may raise CheckpointError.

    Attributes:
        path: the folder.
        gguf: the file with the weights, or None.
        ignored: keys of config.json that are treated as missing.
    """

    def __init__(self, place: Path, ignored: Collection[str] = ()) -> None:
        self.path, self.ignored = place.parent if place.suffix == GGUF and place.is_file() else place, ignored
        named = place != self.path or not has_weights(place)
        found = find_gguf(place) if named else None
        self.gguf = GgufFile(found) if found is not None else None
        self.source = self.path / CONFIG

    @cached_property
    def network(self) -> Network:
        """The description of the text network."""
        described = self.gguf is None or self.source.is_file()
        values = read_json(self.source) if described or self.gguf is None else self.gguf.settings()
        section = values.get(TEXT)
        inner: dict[str, Any] = section if isinstance(section, dict) else {}
        if missing := [name for name in self.ignored if name not in values and name not in inner]:
            raise CheckpointError(
                f"{self.source}: {missing[0]}: not in the file, so it cannot be ignored; correct the name"
            )
        kept = {name: value for name, value in values.items() if name not in self.ignored}
        if inner:
            kept[TEXT] = {name: value for name, value in inner.items() if name not in self.ignored}
        return find_network(kept, self.source, self._names)

    @cached_property
    def config(self) -> Config:
        """The configuration of the text network."""
        generation = read_json_if_present(self.path / GENERATION)
        source = self.source if self.gguf is None or self.source.is_file() else self.gguf.path
        return parse_config(self.network.settings, source, generation, lambda: self.originals)

    @property
    def quantization(self) -> str | None:
        """The `quant_method` of the folder; None if its weights are not quantized."""
        return quantized.method(self.network.settings) if self.gguf is None else None

    @cached_property
    def stored(self) -> tuple[WeightFormat, dict[str, Path]]:
        """The weight file format and the file of each tensor, by its name in the files."""
        return find_weights(self.path)

    @cached_property
    def unwrapped(self) -> dict[str, str]:
        """The name of each tensor without the names of wrappers -> its name in the files."""
        return without_wrappers(self.stored[1])

    def _names(self) -> Collection[str]:
        return self.unwrapped if self.gguf is None else {HEADS.get(name, name) for name in self.gguf.tensors}

    @cached_property
    def originals(self) -> dict[str, str]:
        """The name of each tensor of the text network -> its name in the files."""
        if self.gguf is not None:
            return {name: name for name in self.weights.entries}
        named = ((self.network.rename(plain), name) for plain, name in self.unwrapped.items())
        return {ours: name for ours, name in named if ours is not None}

    @cached_property
    def weights(self) -> Weights:
        """All weights in the GGUF file."""
        assert self.gguf is not None
        return self.gguf.open(self.network.settings)

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of each weight of the text network."""
        if self.gguf is not None:
            return dict.fromkeys(self.originals, self.gguf.path)
        files, named, kind = self.stored[1], self.originals, self.quantization
        named = named if kind is None else quantized.weights_in(kind, named)
        return {name: files[original] for name, original in named.items()}

    def open(self, names: Iterable[str]) -> Weights:
        """Open weights under their names in the text network, with full precision and only the rows in use."""
        return _first_rows(self.open_whole(names), self.network.rows)

    def open_whole(self, names: Iterable[str]) -> Weights:
        """Open weights as `open` does, but with all rows of the embedding."""
        names = list(names)
        if self.gguf is not None:
            return self.weights.only(name for name in names if name in self.weights.entries)
        present = [name for name in names if name in self.files]
        if (quantization := self.quantization) is not None:
            size = quantized.block_size(self.network.settings, self.source)
            return quantized.open_dequantized(quantization, self._open_stored, present, self.originals.keys(), size)
        return self._open_stored(present)

    def _open_stored(self, names: Iterable[str]) -> Weights:
        kind, files = self.stored
        own = {self.originals[name]: name for name in names}
        chosen = {original: files[original] for original in own}
        if (quantization := self.quantization) is not None and kind.single_file == SINGLE:
            opened = open_safetensors(chosen, self.path, also=quantized.STORED[quantization])
        else:
            opened = kind.open(chosen, self.path)
        if problem := empty_weights(opened.entries):
            raise CheckpointError(f"{self.path}: {problem}")
        if all(original == name for original, name in own.items()):
            return opened
        entries = {own[original]: entry for original, entry in opened.entries.items()}
        origins = {name: original for original, name in own.items()}
        return Weights(entries, lambda name: opened.read(origins[name]), self.path, origins)

    def identity(self) -> str:
        """Return the identity of the text network."""
        if self.gguf is not None:
            return with_ignored(stored_identity(self.config, self.gguf.places()), self.ignored)
        kind, files = self.stored
        kept = {name: files[name] for name in self.originals.values()}
        found = (
            tensors_identity(self.config, kept)
            if kind.single_file == SINGLE
            else pickles_identity(self.config, set(kept.values()))
        )
        return with_ignored(found, self.ignored)

    def log(self) -> None:
        """Log the parts of the folder that are left out or changed when it is read."""
        if self.ignored:
            logger.warning("%s: ignored %s, as requested", self.source, ", ".join(self.ignored))
        if self.network.wrapper is not None and self.gguf is None:
            left = len(self.stored[1]) - len(self.originals)
            logger.warning(
                "%s: only the text network (%s) of the %s model is read; %d weights of other parts are left out",
                self.path,
                self.network.settings["model_type"],
                self.network.wrapper,
                left,
            )
        for name in self.network.applied:
            logger.warning(
                "%s: %s: the %s class of transformers ignores this key; it is applied, as the text network's own "
                "class (%s) does",
                self.source,
                name,
                self.network.wrapper,
                self.network.settings["model_type"],
            )
        formats, dtype = (self.gguf.quantizations() if self.gguf is not None else []), "float32"
        if (quantization := self.quantization) is not None:
            name, dtype = quantized.READ[quantization]
            formats.append(name)
        if formats:
            logger.warning("%s: weights in %s are dequantized to %s", self.path, ", ".join(formats), dtype)


def _first_rows(weights: Weights, rows: int | None) -> Weights:
    """Return the same weights with only the first rows of the embedding."""
    entry = weights.entries.get(ROWS_OF)
    if rows is None or entry is None or entry.shape[0] <= rows:
        return weights
    entries = {**weights.entries, ROWS_OF: entry._replace(shape=(rows, *entry.shape[1:]))}
    return replace(weights, entries=entries, read=lambda name: weights.read(name)[: rows if name == ROWS_OF else None])


def _open_weights(folder: Folder) -> Weights:
    """Open the weights of the text network under our names, in the dtype on disk and in the order of the files.

    Raises CheckpointError if a weight is missing, or if the folder has a weight that the model does not have.
    """
    model, files = folder.config.model, folder.files
    kind_of_model = str(folder.network.settings["model_type"])
    family = families.FAMILIES.get(kind_of_model)
    unneeded = UNNEEDED if family is not None else READERS[kind_of_model].unneeded
    heads, tied = weight_map.heads_of(folder.config), not model.no_weight_tying
    rows = rows_of(folder)
    wanted = [row for row in rows if not OPTIONAL.fullmatch(row.ours) or any(name in files for name in row.theirs)]
    if tied:
        wanted = [row for row in wanted if row.ours != HEAD]
        names = {row.ours: row.theirs[0] for row in rows if row.ours in (HEAD, EMBEDDING)}
        if files.keys() >= set(names.values()):  # the folder may contain a tied head if it equals the embedding
            both = folder.open(names.values())
            if not torch.equal(both.read(names[HEAD]), both.read(names[EMBEDDING])):
                raise CheckpointError(
                    f"{folder.path}: {names[HEAD]} differs from {names[EMBEDDING]}, but {CONFIG} ties these weights; "
                    f"set tie_word_embeddings to false in {CONFIG}"
                )
    order = {path: number for number, path in enumerate(dict.fromkeys(files.values()))}
    wanted.sort(key=lambda row: min((order[files[name]] for name in row.theirs if name in files), default=0))
    read = {name for row in rows for name in row.theirs}
    unread = sorted(name for name in files if name not in read and not unneeded.fullmatch(name))
    if family is not None and family.later_layers:
        unread = [name for name in unread if not _is_behind(name, model.num_layers)]
    missing = [name for row in wanted for name in row.theirs if name not in files]
    remedy = f"correct {CONFIG}" + (f", or {families.row_name(kind_of_model)}" if family else "")
    if missing and unread:  # another download would not help
        raise CheckpointError(
            f"{folder.path}: the model described by {CONFIG} has weights with other names ({_some(missing)}) than the "
            f"folder ({_some(unread)}); {remedy}"
        )
    weights = weight_map.our_weights(folder.open(name for row in wanted for name in row.theirs), wanted, heads)
    if unread:
        raise CheckpointError(
            f"{folder.path}: has weights that the model described by {CONFIG} does not have ({_some(unread)}); {remedy}"
        )
    return replace(weights, remedy=f"{remedy} ({BIASES}), or use other weights") if family else weights


def _is_behind(name: str, layers: int) -> bool:
    """Return whether a weight belongs to a layer after the first `layers`. These layers predict further tokens."""
    found = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    return int(found[1]) >= layers if found is not None else "mtp" in name.removeprefix("model.")[:4]


def rows_of(folder: Folder) -> list[weight_map.Row]:
    """Return the table with one row for each weight of ours in the text network. Raises CheckpointError."""
    model, config, files = folder.config.model, folder.network.settings, folder.files
    kind = str(config["model_type"])
    family = families.FAMILIES.get(kind)
    table = family.rows(model) if family is not None else READERS[kind].rows(config, files)
    rows = weight_map.expand(table, model.num_layers)
    if model.skip_first_norm:
        rows = [row for row in rows if not row.ours.startswith("blocks.0.input_layernorm.")]
    if any(name in files for row in rows for name in row.theirs):
        return rows
    return _of_base_class(rows, folder, not model.no_weight_tying)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def _of_base_class(rows: list[weight_map.Row], folder: Folder, tied: bool) -> list[weight_map.Row]:
    """Return the rows with the names that weights have in a folder saved from the class without an output head.

    Raises CheckpointError if the folder does not have these names either, or if the model needs a head of its own.
    """
    shorter = [replace(row, theirs=tuple(name.partition(".")[2] for name in row.theirs)) for row in rows]
    heads = {name for row in rows if row.ours == HEAD for name in row.theirs}
    if not any(name in folder.files for row in shorter for name in row.theirs):
        raise CheckpointError(
            f"{folder.path}: has no weight of the model that {CONFIG} describes (such as {rows[0].theirs[0]}), "
            f"but {', '.join(sorted(folder.files)[:NAMED])}; rename the weights, or correct {CONFIG}"
        )
    if heads and not tied:
        raise CheckpointError(
            f"{folder.path}: has no output head ({min(heads)}), because it was saved from a class without one; save "
            "the model from its class for causal language models (AutoModelForCausalLM)"
        )
    return shorter


def open_folder(place: Path, ignored: Collection[str] = ()) -> OpenedCheckpoint:
    """Open a Hugging Face folder or a GGUF file. Keys of config.json in `ignored` are treated as missing.

    Raises CheckpointError.
    """
    return opened_folder(Folder(place, ignored))


def opened_folder(folder: Folder) -> OpenedCheckpoint:
    """Return the checkpoint with the text network in a folder. Raises CheckpointError."""
    trained = folder.config
    folder.log()
    guessed = {}
    if may_be_coca(folder.network.settings):
        guessed["pos_emb"] = (
            f"{folder.path}: using pos_emb=rotary, but a GPT-NeoX model by CoCA's authors would have the same "
            "config.json; override with pos_emb=coca if the model is theirs, or else with pos_emb=rotary"
        )
    return OpenedCheckpoint(
        folder=folder.path,
        trained=trained,
        tokenizer_folder=None,
        step=None,
        identify=folder.identity,
        weights=partial(_open_weights, folder),
        also_free=frozenset({"pos_emb"}),
        guessed=guessed,
        packed_tokenizer=folder.gguf.write_tokenizer if folder.gguf is not None else None,
        settings=folder.network.settings,
    )
