"""The end of every export: the folder is read back and compared with its source before it counts as complete.

1. The configuration as our import reads it computes the same model (`comparable`).
2. Every weight, read by our import, has the bits that were to be written. One weight is in memory at a time.
3. On a few tokens the logits in float32 are those of the source. Folders for transformers are loaded by transformers,
   if it is installed and has the class; otherwise, if transformers 4 cannot load it, and for GPT-NeoX, by our import.

The logits are those of the first layers, with the first 4,096 rows of the vocabulary: as many layers as fit into
512 MiB, and at least one of every type. So a model of 7 billion parameters is compared by one layer of 0.2 billion
parameters, in 0.8 GB of memory for each side, one after the other. Models of up to about 100 million parameters are
compared whole. The text has 64 tokens, and up to 1,024 if they cross a window, a chunk or the training length. What
only longer texts show is compared only by its keys.
"""

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.huggingface.family_keys import comparable
from megatron_coca.checkpoints.load import load_weights, open_checkpoint
from megatron_coca.checkpoints.weights import WeightEntry, Weights
from megatron_coca.config import COMPUTE_KEYS, KEYS, Config, load_config
from megatron_coca.config.schema import default_of
from megatron_coca.model import empty_model

logger = logging.getLogger(__name__)

MEMORY, ROWS = 1 << 29, 4096
"""Bytes of the compared layers in float32, and rows of the vocabulary."""
SHORT, LONG = 64, 1024
"""Tokens of the text, and at most where a limit is crossed."""
TOLERANCE = 1e-3
"""Largest difference of logits, as a share of the largest logit. Both sides compute in float32, in another order; they
differ by less than 1e-5 in small models. A wrong key changes them by more than 1e-2.
"""
OURS = "this project's import"
OLDEST = 5
"""The first version of transformers that can load every export; earlier ones lack layers with bases of their own."""
VOCABULARY = ("embedding.word_embeddings.weight", "final_linear.weight")
"""Our weights with a row for each token."""


class Excerpt(NamedTuple):
    """The part of a model whose logits are compared: its first layers and rows of the vocabulary, and the text."""

    config: Config
    weights: Weights
    ids: Tensor  # int64 [1, length]

    def logits(self) -> Tensor:
        """Return ours, float32 [length, rows]."""
        return own_logits(self.config, self.weights, self.ids)


def excerpt(config: Config, weights: Weights, longest: int = LONG) -> Excerpt:
    """Return the part of a model that is compared; `weights` have our names, the text at most `longest` tokens."""
    rows, layers = min(config.model.padded_vocab_size, ROWS), _layers(config, weights)
    text = torch.randint(rows, (1, min(_length(config), longest)), generator=torch.Generator().manual_seed(0))
    return Excerpt(reduced(config, layers, rows), first(weights, layers, rows), text)


def first(weights: Weights, layers: int, rows: int) -> Weights:
    """Return the weights of the first layers, and the first rows of the vocabulary."""
    kept = (name for name in weights.entries if (number := _layer(name)) is None or number < layers)
    entries = {name: _cut(name, weights.entries[name], rows) for name in kept}
    return Weights(
        entries,
        lambda name: weights.read(name)[: rows if name in VOCABULARY else None],
        weights.source,
        weights.origins,
    )


def _cut(name: str, entry: WeightEntry, rows: int) -> WeightEntry:
    return entry._replace(shape=(rows, *entry.shape[1:])) if name in VOCABULARY else entry


def _layer(name: str) -> int | None:
    """The block of a weight of ours."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blocks" else None


def _layers(config: Config, weights: Weights) -> int:
    """The number of layers to compare: those in MEMORY, at least one of every type."""
    sizes = [0] * config.model.num_layers
    for name, entry in weights.entries.items():
        if (number := _layer(name)) is not None:
            sizes[number] += 4 * prod(entry.shape)
    names = config.model.layer_names
    needed = max(names.index(name) for name in set(names)) + 1
    fitting = [count for count in range(1, len(sizes) + 1) if sum(sizes[:count]) <= MEMORY]
    return max(needed, *fitting, 1)


def _length(config: Config) -> int:
    limits = [config.model.seq_length, config.position.original_length(config.model.seq_length)]
    for kind in config.layer_types.values():
        limits += [limit + 1 for limit in (kind.sliding_window_width, kind.attention_chunk_size) if limit is not None]
        settings = kind.relative_positions.settings(config.model.seq_length) if kind.relative_positions else {}
        limits += [limit for limit in settings.values() if isinstance(limit, int)]
    crossed = max((limit + limit // 2 for limit in limits if limit + limit // 2 <= LONG), default=0)
    length = max(SHORT, crossed)
    if config.position.embedding.weights == "table":
        length = min(length, config.model.max_position_embeddings - config.model.opt_pos_emb_offset)
    return length


def reduced(config: Config, layers: int, rows: int) -> Config:
    """The configuration of the first layers of a model, without anything of its run."""
    flat, names = config.flat(), config.model.layer_names[:layers]
    keys = {
        key: flat[key]
        for key, place in KEYS.items()
        if place.group in ("model", "position") and key not in COMPUTE_KEYS and flat[key] != default_of(key, flat)
    }
    keys.pop("imports", None)  # what they declare is known already
    keys |= {"num_layers": layers, "attention_config": [[list(names), 1]]}
    return load_config([], keys | {"vocab_size": rows, "make_vocab_size_divisible_by": 1})


@torch.no_grad()
def own_logits(config: Config, weights: Weights, ids: Tensor) -> Tensor:
    """Return the logits of our model in float32 [length, rows]."""
    model = empty_model(config, "cpu", training=False)
    load_weights(model, weights)
    return model.eval()(ids)[0]


# Comparison -----------------------------------------------------------------------------------------------------------


def check_folder(folder: Path, config: Config, weights: Weights) -> None:
    """Compare configuration and weights of an export, as our import reads them, with the source.

    `weights` are those that were to be written, by our names. Raises CheckpointError.
    """
    try:
        back = open_checkpoint(folder)
        read = back.weights()
    except CheckpointError as error:
        raise _fault(f"this project's import cannot read it: {error}") from error
    if differing := list(_differing(comparable(config), comparable(back.trained))):
        raise _fault(f"its configuration is read as another model: {'; '.join(differing)}")
    if names := sorted(read.entries.keys() ^ weights.entries.keys()):
        raise _fault(f"{names[0]} is in the source or in the folder, not in both")
    with weights.shown(f"reading {folder.name.strip('.').removesuffix('.partial')} back") as shown:
        for name, tensor in shown:
            if not _same_bits(tensor, read.read(name)):
                raise _fault(f"{name} is not what was written")


def _differing(wanted: Any, found: Any, place: str = "") -> Iterator[str]:
    """Yield a line for every value in which two configurations differ, with that of the folder first."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in wanted.keys() | found.keys():
            yield from _differing(wanted.get(key), found.get(key), f"{place}.{key}" if place else key)
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
            yield from _differing(one, other, f"{place}[{number}]")
    elif wanted != found:
        yield f"{place} is {found!r}, not {wanted!r}"


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)))


def check_logits(expected: Tensor, found: Tensor, by: str) -> float:
    """Return the largest difference of logits as a share of the largest one. Raises CheckpointError above TOLERANCE."""
    if found.shape != expected.shape:
        raise _fault(f"{by} gives logits {list(found.shape)}, the source {list(expected.shape)}")
    if not torch.equal(expected.isfinite(), found.isfinite()):
        raise _fault(f"{by} gives infinite logits at other places than the source")
    finite = expected.isfinite()
    largest = float(expected[finite].abs().max()) if finite.any() else 0.0
    apart = float((expected - found)[finite].abs().max()) if finite.any() else 0.0
    if apart > TOLERANCE * max(largest, 1e-3):
        raise _fault(
            f"{by} gives other logits: {apart:.3g} from those of the source, of which the largest is {largest:.3g}"
        )
    return apart / max(largest, 1e-3)


def _fault(problem: str) -> CheckpointError:
    return CheckpointError(
        f"the export does not compute what its source does: {problem}. Nothing is left of it; report this with the "
        "checkpoint's configuration"
    )


# By transformers ------------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """A folder for transformers.

    Attributes:
        folder: its location.
        architecture: the class.
        modelling_file: the file that has the class, or None for one of transformers.
        tensors: its weights by their names.
        names: their names of each of our weights.
        keys: their names of num_hidden_layers and vocab_size.
        attention: the attention implementation that computes what the architecture is.
    """

    folder: Path
    architecture: str
    modelling_file: str | None
    tensors: Weights
    names: Mapping[str, tuple[str, ...]]
    keys: tuple[str, str]
    attention: str = "eager"


def check_transformers(written: Written, part: Excerpt, write: Callable[[Path, Weights], None]) -> str:
    """Compare logits of a written folder, as transformers computes them, with those of the source.

    `write` writes a file of weights. Returns by what they were compared. Raises CheckpointError.
    """
    expected, layers = part.logits(), part.config.model.num_layers
    with TemporaryDirectory(dir=written.folder, prefix=".excerpt") as name:
        folder = Path(name)
        write(folder, _first_written(written, part))
        settings = native.read_json(written.folder / "config.json")
        native.write_json(folder / "config.json", _first_settings(settings, written.keys, part))
        found, by = _their_logits(written, folder, part.ids)
        if found is None:
            reason, by = by, OURS
            logger.warning("the export is compared with its source by %s only: %s", by, reason)
            back = open_checkpoint(folder)
            found = own_logits(reduced(back.trained, layers, len(expected[0])), back.weights(), part.ids)
    return report(part, check_logits(expected, found, by), by)


def report(part: Excerpt, share: float, by: str) -> str:
    """Log the result of a comparison; returns by what it was made."""
    layers, tokens = part.config.model.num_layers, part.ids.shape[1]
    what = f"{by}, {layers} layers, {tokens} tokens, within {share:.1e} of the largest logit"
    logger.info("the export computes what its source does: %s", what)
    return by


def _first_written(written: Written, part: Excerpt) -> Weights:
    """Their tensors of the first layers, as they are in the file."""
    rows = part.config.model.padded_vocab_size
    cut = {name for ours in VOCABULARY for name in written.names.get(ours, ())}
    kept = [name for ours in part.weights.entries for name in written.names[ours]]
    entries = {name: written.tensors.entries[name] for name in kept}
    entries |= {name: entries[name]._replace(shape=(rows, *entries[name].shape[1:])) for name in kept if name in cut}
    return Weights(
        entries, lambda name: written.tensors.read(name)[: rows if name in cut else None], written.folder
    ).to(torch.float32)


def _first_settings(settings: Mapping[str, Any], keys: tuple[str, str], part: Excerpt) -> dict[str, Any]:
    """The config.json of the first layers."""
    count, layers = settings[keys[0]], part.config.model.num_layers
    kept = {
        name: value[:layers] if isinstance(value, list) and len(value) == count and "layer" in name else value
        for name, value in settings.items()
    }
    kept |= {keys[0]: layers, keys[1]: part.config.model.padded_vocab_size, "dtype": "float32"}
    kept |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if "layers" in (position := settings.get("position") or {}):
        kept["position"] = {**position, "layers": position["layers"][:layers]}
    return kept


@torch.no_grad()
def _their_logits(written: Written, folder: Path, ids: Tensor) -> tuple[Tensor | None, str]:
    """Return float32 logits [length, rows] and by what they were computed, or None and why not."""
    try:
        import transformers
    except ImportError as error:
        return None, f"transformers is not installed ({error})"
    by = f"transformers {transformers.__version__}"
    with _class_of(written, transformers) as found:
        if isinstance(found, str):
            return None, f"{by} {found}"
        try:
            with _no_progress(transformers):
                model = found.from_pretrained(folder, local_files_only=True, attn_implementation=written.attention)
            return model.eval()(input_ids=ids, use_cache=False).logits[0].float(), by
        except Exception as error:  # whatever the class raises for a configuration that it cannot use
            if int(transformers.__version__.partition(".")[0]) < OLDEST:
                return None, f"{by} cannot load it ({type(error).__name__}: {error})"
            raise _fault(f"{by} cannot load it ({type(error).__name__}: {error})") from error


@contextmanager
def _no_progress(transformers: Any) -> Iterator[None]:
    """Show no bar of the library's for a few weights."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


class _Uncached(SourceFileLoader):
    """Leaves no compiled copy in the folder, which is an export."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        pass


@contextmanager
def _class_of(written: Written, transformers: Any) -> Iterator[Any]:
    """The class of a folder, or why there is none. A modelling file is not copied to transformers' cache."""
    if written.modelling_file is None:
        yield getattr(transformers, written.architecture, f"has no {written.architecture}")
        return
    name, path = "megatron_coca_read_back", str(written.folder / written.modelling_file)
    spec = importlib.util.spec_from_file_location(name, path, loader=_Uncached(name, path))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            yield f"is not one that its modelling file needs ({error})"
        else:
            yield getattr(module, written.architecture)
    finally:
        del sys.modules[name]
