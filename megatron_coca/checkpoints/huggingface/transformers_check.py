"""Compare the logits that transformers computes from an exported Hugging Face folder with those of the source."""

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_coca.checkpoints.export_check import (
    IMPORT,
    VOCABULARY,
    Excerpt,
    check_logits,
    fault,
    own_logits,
    reduced,
    report,
)
from megatron_coca.checkpoints.files import read_json, write_json
from megatron_coca.checkpoints.huggingface.config_json import CONFIG, MLPS, NETWORK
from megatron_coca.checkpoints.huggingface.read import open_folder
from megatron_coca.checkpoints.weights import Weights

logger = logging.getLogger(__name__)

OLDEST = 5
"""The first major version of transformers that can load every export. Version 4 lacks a rotary base for each layer."""
NEED_PADDING = frozenset({"modernbert-decoder"})
"""Values of `model_type` for which the class needs a padding token."""


class Written(NamedTuple):
    """An exported folder for transformers.

    Attributes:
        folder: path of the folder.
        architecture: name of the model class.
        modelling_file: the file that defines the class, or None if transformers defines it.
        tensors: the exported weights under their exported names.
        names: our name of each weight -> its exported names.
        keys: the architecture's names of the keys num_hidden_layers and vocab_size.
        attention: the `attn_implementation` that computes the model correctly.
    """

    folder: Path
    architecture: str
    modelling_file: str | None
    tensors: Weights
    names: Mapping[str, tuple[str, ...]]
    keys: tuple[str, str]
    attention: str = "eager"


def check_transformers(written: Written, part: Excerpt, write: Callable[[Path, Weights], None], scratch: Path) -> str:
    """Compare the logits that transformers computes from an exported folder with those of the source.

    `write` saves weights in a folder; `scratch` is a folder for temporary files. Return the program that computed the
    export's logits. Raises CheckpointError.
    """
    expected, layers = part.logits(), part.config.model.num_layers
    with TemporaryDirectory(dir=scratch, prefix=".excerpt") as name:
        folder = Path(name)
        write(folder, _first_written(written, part))
        settings = read_json(written.folder / CONFIG)
        write_json(folder / CONFIG, _first_settings(settings, written.keys, part))
        found, by = _their_logits(written, folder, part.ids)
        if found is None:
            reason, by = by, IMPORT
            logger.warning("export: compared with the source by %s instead of transformers: %s", by, reason)
            back = open_folder(folder)
            found = own_logits(reduced(back.trained, layers, len(expected[0])), back.weights(), part.ids)
    return report(part, check_logits(expected, found, by), by)


def _first_written(written: Written, part: Excerpt) -> Weights:
    """Return the exported weights of the first layers, read from the exported file and converted to float32."""
    rows = part.config.model.padded_vocab_size
    cut = {name for ours in VOCABULARY for name in written.names.get(ours, ())}
    kept = [name for ours in part.weights.entries for name in written.names[ours]]
    entries = {name: written.tensors.entries[name] for name in kept}
    entries |= {name: entries[name]._replace(shape=(rows, *entries[name].shape[1:])) for name in kept if name in cut}
    return Weights(
        entries,
        lambda name: written.tensors.read(name)[:rows] if name in cut else written.tensors.read(name),
        written.folder,
    ).to(torch.float32)


def _first_settings(settings: Mapping[str, Any], keys: tuple[str, str], part: Excerpt) -> dict[str, Any]:
    """Return the content of config.json for a model with only the first layers."""
    count, layers = settings[keys[0]], part.config.model.num_layers
    kept = {
        name: value[:layers] if isinstance(value, list) and len(value) == count and "layer" in name else value
        for name, value in settings.items()
    }
    if "attention_types" in settings:  # a key of GPT-Neo
        kept["attention_types"] = [[kept["attention_layers"], 1]]
    if "per_layer_config" in settings:  # a key of Gemma 4
        changes = settings["per_layer_config"].items()
        kept["per_layer_config"] = {number: change for number, change in changes if int(number) < layers}
    if "scale_depth" in settings:  # MiniCPM 3 divides this key by the root of the number of layers
        kept["scale_depth"] = settings["scale_depth"] * sqrt(layers / count)
    kept |= {keys[0]: layers, keys[1]: part.config.model.padded_vocab_size, "dtype": "float32"}
    # Some classes raise an error for ids beyond the kept rows. Not every class accepts a missing id.
    padding = 0 if settings["model_type"] in NEED_PADDING else None
    kept |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": padding}
    if "layers" in (position := settings.get("position") or {}):
        kept["position"] = {**position, "layers": position["layers"][:layers]}
    if MLPS in (network := settings.get(NETWORK) or {}):
        kept[NETWORK] = {**network, MLPS: network[MLPS][:layers]}
    return kept


@torch.no_grad()
def _their_logits(written: Written, folder: Path, ids: Tensor) -> tuple[Tensor | None, str]:
    """Return float32 logits [length, rows] and the program that computed them, or None and why there are no logits."""
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
        except Exception as error:  # classes raise many error types for unsupported configurations
            if int(transformers.__version__.partition(".")[0]) < OLDEST:
                return None, f"{by} cannot load it ({type(error).__name__}: {error})"
            raise fault(f"{by} cannot load it ({type(error).__name__}: {error})") from error


@contextmanager
def _no_progress(transformers: Any) -> Iterator[None]:
    """Disable the progress bars of transformers."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


class _Uncached(SourceFileLoader):
    """Loads a module without writing bytecode into the exported folder."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        pass


@contextmanager
def _class_of(written: Written, transformers: Any) -> Iterator[Any]:
    """Yield the model class of an exported folder, or the reason if it cannot be imported.

    The modelling file is not copied to transformers' cache.
    """
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
            yield f"is not supported by the modelling file ({error})"
        else:
            yield getattr(module, written.architecture)
    finally:
        del sys.modules[name]
