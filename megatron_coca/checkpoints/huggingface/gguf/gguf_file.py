"""Read models in GGUF files, the format of llama.cpp. Their quantized weights are dequantized to float32.

transformers describes the model and names its weights, and the package `gguf` dequantizes them.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_coca.checkpoints.files import CheckpointError, write_json
from megatron_coca.checkpoints.huggingface.gguf import tokenizer
from megatron_coca.checkpoints.huggingface.gguf.header import read_header
from megatron_coca.checkpoints.weights import StoredTensor, WeightEntry, Weights
from megatron_coca.data.tokenizers.huggingface_kind import library_errors_as_data_errors
from megatron_coca.support.arguments import GGUF
from megatron_coca.support.regular_files import open_regular

Json = Mapping[str, Any]
SAME_NAMES = ("attn_logit_softcapping", "final_logit_softcapping")
RENAMED = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.freq_base_swa": "rope_local_base_freq",
} | {name: name for name in SAME_NAMES}
"""Keys of a GGUF file that transformers does not read -> keys of config.json. The keys of the file are listed without
their prefix, the name of the architecture.
"""
BASE, ROTATED, NORM = "rope.freq_base", "rope.dimension_count", "attention.layer_norm_epsilon"
RMS_NORM, WINDOW = "attention.layer_norm_rms_epsilon", "attention.sliding_window"
DEFAULT_BASE = 10000.0
"""The value of BASE in a file without this key, for every architecture. Classes of transformers have other defaults."""
REQUIRED = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
"""Keys without a default. If one is missing, transformers uses the value of some model of the architecture."""
EPSILONS = {"falcon": "layer_norm_epsilon", "nemotron": "norm_eps"}
"""Architectures for which transformers does not read NORM -> the key of config.json for its value."""
PARTLY_ROTATED = ("stablelm", "nemotron", "phi3")
"""Values of `model_type` for which config.json has the key partial_rotary_factor."""
LARGEST = {"gemma2": 46, "gemma3": 62}
"""Numbers of layers of the models with 27 billion parameters. Only these models scale queries by the square root of
hidden_size / heads, which no key of the file records. All others scale queries by the square root of head_dim.
"""
NO_EFFECT = frozenset(
    {
        *("context_length", "feed_forward_length", "vocab_size", "tensor_data_layout", "attention.value_length"),
        *("attention.head_count_kv", "pooling_type", "use_parallel_residual"),
    }
)
"""Keys that need not be read, because other keys or the names and shapes of the weights determine them."""
CAUSAL, KEY_HEADS = "attention.causal", "attention.head_count_kv"
BIASES = {"attn_q.bias": "attention_bias", "ffn_down.bias": "mlp_bias"}
"""A bias in the first layer -> the key of config.json that announces such biases. Only some classes have this key."""
EXTENSION = "rope.scaling."
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that contain a frequency extension."""
HEADS = {"output.weight": "lm_head.weight"}
"""Name of the head in a GGUF file -> its name in transformers."""
IMAGES = "mmproj"
"""Beginning of the name of a file with the part of a model that reads images."""
_REMEDY = "put the config.json of the original model beside the file"
_TOKENIZER_REMEDY = "put the tokenizer.json of the original model beside the file"


def find_gguf(place: Path) -> Path | None:
    """Return the GGUF file at a path: the file itself, or the only one in a folder; None if there is none.

    Raises CheckpointError if a folder has several.
    """
    if place.suffix == GGUF and os.path.isfile(place):
        return place
    found = gguf_files(place)
    if len(found) > 1:
        raise CheckpointError(
            f"{place}: has several GGUF files ({', '.join(path.name for path in found[:3])}); name one of them, "
            f"such as {found[0]}, or join the parts of a split file with llama-gguf-split --merge"
        )
    return found[0] if found else None


def gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF files in a folder, without those for images. The list is empty if the folder cannot be read."""
    try:
        names = sorted(os.listdir(folder))
    except (OSError, ValueError):
        return []
    kept = (folder / name for name in names if name.endswith(GGUF) and not name.startswith(IMAGES))
    return [path for path in kept if os.path.isfile(path)]


class _Libraries(NamedTuple):
    gguf: Any
    utilities: Any


def _libraries(path: Path) -> _Libraries:
    try:
        import gguf
        from transformers import modeling_gguf_pytorch_utils as utilities
    except ImportError as error:
        raise CheckpointError(
            f"{path}: reading GGUF needs gguf and transformers ({error}); run `pip install gguf transformers`"
        ) from error
    return _Libraries(gguf, utilities)


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # the libraries raise errors of many types for damaged files and unknown architectures
        raise CheckpointError(
            f"{path}: cannot be read as GGUF ({type(error).__name__}: {error}); download it again, or use the original "
            "model"
        ) from error


class GgufFile:
    """A GGUF file. Its header is read when it is first needed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _reader(self) -> Any:
        try:
            open_regular(self.path).close()
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error}); check the file") from error
        _libraries(self.path)
        with _as_checkpoint_error(self.path):
            return read_header(self.path)

    @cached_property
    def _values(self) -> dict[str, Any]:
        """The values of the header by their keys. A vocabulary and other lists of strings are None."""
        texts = _libraries(self.path).gguf.GGUFValueType.STRING
        with _as_checkpoint_error(self.path):
            return {
                name: None if len(field.types) > 1 and field.types[-1] == texts else field.contents()
                for name, field in self._reader.fields.items()
            }

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """The tensors by their names in the file."""
        return {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def _architecture(self) -> str:
        with _as_checkpoint_error(self.path):
            return str(self._values["general.architecture"])

    def settings(self) -> dict[str, Any]:
        """Return the content of a config.json that describes the model. Raises CheckpointError."""
        prefix = f"{self._architecture}."
        given = {name.removeprefix(prefix): value for name, value in self._values.items() if name.startswith(prefix)}
        with _as_checkpoint_error(self.path):
            self._check_present(given)
            if int(given["block_count"]) > len(self.tensors):  # building a model takes time for every layer
                raise ValueError(f"it announces {given['block_count']:,} layers, but has {len(self.tensors):,} weights")
            found = _libraries(self.path).utilities.load_gguf_checkpoint(str(self.path))["config"]
        self._check_not_extended(given)
        self._check_read(given)
        own = {name: given[theirs] for theirs, name in RENAMED.items() if given.get(theirs) is not None}
        own |= {name: value for name, value in found.items() if value is not None and not name.startswith("_")}
        with _as_checkpoint_error(self.path):
            return self._completed(given, own | self._unread(given, own))

    def _check_present(self, given: Json) -> None:
        """Raise CheckpointError if the file lacks a key that has no default."""
        mapped = _libraries(self.path).utilities.GGUF_TO_TRANSFORMERS_MAPPING["config"].get(self._architecture, {})
        epsilon = NORM if NORM in mapped or self._architecture in EPSILONS else RMS_NORM
        needed = [*REQUIRED, epsilon, *([WINDOW] if self._architecture == "gemma3" else ())]
        if missing := [name for name in needed if given.get(name) is None]:
            raise CheckpointError(
                f"{self.path}: {self._architecture}.{missing[0]}: missing, and it has no default; {_REMEDY}"
            )

    def _check_not_extended(self, given: Json) -> None:
        """Raise CheckpointError if the file has a frequency extension. A factor without a type is that of linear
        interpolation, and a factor of 0 means 1.
        """
        kind, factor = given.get(f"{EXTENSION}type", "linear"), given.get(f"{EXTENSION}factor") or 1.0
        found = [name for name in FACTORS if name in self.tensors]
        if given.get(f"{EXTENSION}attn_factor", 1.0) != 1.0:
            found.append(f"{self._architecture}.{EXTENSION}attn_factor")
        if kind not in ("none", "linear") or (kind == "linear" and factor != 1.0):
            name = f"{EXTENSION}type" if f"{EXTENSION}type" in given else f"{EXTENSION}factor"
            found.append(f"{self._architecture}.{name}")
        if found:
            raise CheckpointError(
                f"{self.path}: {found[0]}: a frequency extension in a GGUF file is not supported; {_REMEDY}"
            )

    def _check_read(self, given: Json) -> None:
        """Raise CheckpointError if the file has a key that may change the model and that nothing reads."""
        mapped = _libraries(self.path).utilities.GGUF_TO_TRANSFORMERS_MAPPING["config"].get(self._architecture, {})
        known = mapped.keys() | RENAMED.keys() | NO_EFFECT | {BASE, ROTATED, CAUSAL}
        known |= {NORM} if self._architecture in EPSILONS else set()
        unread = [name for name in given if name not in known and not name.startswith(EXTENSION)]
        if unread:
            raise CheckpointError(
                f"{self.path}: {self._architecture}.{unread[0]}: not supported and may change the model; {_REMEDY}"
            )
        if given.get(CAUSAL) is False:
            raise CheckpointError(
                f"{self.path}: {self._architecture}.{CAUSAL}: false, so tokens attend to later ones, which is not "
                "supported; choose a model that generates text"
            )

    def _unread(self, given: Json, own: Json) -> dict[str, Any]:
        """Return the keys of config.json that transformers does not derive from the file.

        Raises CheckpointError if the class cannot rotate the number of features that the file gives.
        """
        from transformers import AutoConfig

        kind, found = own["model_type"], dict[str, Any]()
        keys = AutoConfig.for_model(kind).to_dict()
        heads, hidden = own.get("num_attention_heads", 1), own.get("hidden_size", 0)
        width = own.get("head_dim") or hidden // heads
        if keys.get("head_dim") is not None and hidden:
            found["head_dim"] = width
        if "rope_parameters" in keys:
            found["rope_theta"] = given.get(BASE, DEFAULT_BASE)
        if NORM in given and self._architecture in EPSILONS:
            found[EPSILONS[self._architecture]] = given[NORM]
        rotated = given.get(ROTATED, width)
        if kind in PARTLY_ROTATED:
            found["partial_rotary_factor"] = rotated / width
        elif rotated != width:
            raise CheckpointError(
                f"{self.path}: {self._architecture}.{ROTATED}: {rotated} of {width} features per head are not "
                f"supported; {_REMEDY}"
            )
        if self._architecture in LARGEST:
            largest = own["num_hidden_layers"] == LARGEST[self._architecture]
            found["query_pre_attn_scalar"] = hidden // heads if largest else width
        if kind == "mistral" and "sliding_window" not in own:
            found["sliding_window"] = None  # the class has a default
        return found

    def _completed(self, given: Json, own: dict[str, Any]) -> dict[str, Any]:
        """Add the keys of config.json that follow from optional keys or from the weights to `own`, and return it."""
        from transformers import AutoConfig

        names = _libraries(self.path).utilities.GGUF_TO_TRANSFORMERS_MAPPING["config"].get(self._architecture, {})
        heads, key_heads = names.get("attention.head_count"), names.get(KEY_HEADS)
        if key_heads is not None and given.get(KEY_HEADS) is None:
            own[key_heads] = own[heads]
        first = {name.removeprefix("blk.0.") for name in self.tensors if name.startswith("blk.0.")}
        keys = AutoConfig.for_model(own["model_type"]).to_dict()
        own |= {key: True for bias, key in BIASES.items() if bias in first and key in keys}
        if self._architecture == "gpt2":
            own["n_positions"], own["n_inner"] = own.pop("n_ctx"), own.pop("feed_forward_length")
        if self._architecture == "falcon":
            count = own.pop("num_key_value_heads")
            own |= {"new_decoder_architecture": "attn_norm_2.weight" in first, "num_kv_heads": count}
            own |= {"multi_query": count == 1, "bias": "attn_qkv.bias" in first}
            own["ffn_hidden_size"] = own.pop("intermediate_size")
        return own

    def open(self, settings: Json) -> Weights:
        """Open the weights under their names in transformers. `settings` describes the model as config.json does.

        Raises CheckpointError.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        libraries = _libraries(self.path)
        own = {name: value for name, value in settings.items() if name != "model_type"}
        with _as_checkpoint_error(self.path):
            architecture, utilities = self._architecture, libraries.utilities
            processor = utilities.TENSOR_PROCESSORS.get(architecture, utilities.TensorProcessor)(config=dict(settings))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(str(settings["model_type"]), **own))
            named = HEADS | utilities.get_gguf_hf_weights_map(model, processor)
        shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
        origins = {named.get(name, name): name for name in self.tensors if name not in FACTORS}
        entries = {}
        for name, origin in origins.items():
            stored, wanted = _shape(self.tensors[origin]), shapes.get(name, ())
            # Some classes store the matrix transposed.
            entries[name] = WeightEntry(torch.float32, wanted if sorted(wanted) == sorted(stored) else stored)

        def read(name: str) -> Tensor:
            tensor = self.tensors[origins[name]]
            values = libraries.gguf.dequantize(tensor.data, tensor.tensor_type)
            if architecture == "falcon" and ".attn_qkv." in tensor.name:
                values = _grouped(values, int(own["num_attention_heads"]), int(own.get("num_kv_heads") or 1))
            return _processed(values, tensor.name, processor, named)

        return Weights(entries, read, self.path, origins)

    def write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer in the file to a folder, under transformers' file names.

        Raises CheckpointError, also if the tokenizer would encode texts differently than the model expects.
        """
        with _as_checkpoint_error(self.path), library_errors_as_data_errors():
            self._reader  # noqa: B018 - check the counts in the header before transformers reads it
            if (problem := tokenizer.problem(self._values)) is not None:
                raise CheckpointError(f"{self.path}: {problem}; {_TOKENIZER_REMEDY}")
            from transformers import PreTrainedTokenizerFast  # unlike AutoTokenizer, reads no other file of the folder

            found = PreTrainedTokenizerFast(name_or_path=str(self.path.parent), gguf_file=self.path.name)
            tokenizer.adapt(found.backend_tokenizer, self._values)
            found.save_pretrained(folder)
            begin = self._values.get("tokenizer.ggml.bos_token_id")
            ids = {"bos_token_id": begin, "eos_token_id": tokenizer.ends_of(self._values) or None}
            write_json(folder / "config.json", {name: value for name, value in ids.items() if value is not None})

    def places(self) -> dict[str, tuple[Path, StoredTensor]]:
        """Return the place of each tensor in the file."""
        return {
            name: (
                self.path,
                StoredTensor(tensor.tensor_type.name, _shape(tensor), int(tensor.data_offset), int(tensor.n_bytes)),
            )
            for name, tensor in self.tensors.items()
        }

    def quantizations(self) -> list[str]:
        """Return the names of the quantized formats in the file."""
        plain = ("F32", "F16", "BF16", "F64")
        return sorted({tensor.tensor_type.name for tensor in self.tensors.values()} - set(plain))


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(length) for length in reversed(tensor.shape))


def _grouped(values: Any, heads: int, key_heads: int) -> Any:
    """Return Falcon's rows of queries, keys and values in groups of one key head, as in transformers. llama.cpp stores
    all queries, then all keys, then all values.
    """
    width = len(values) // (heads + 2 * key_heads)
    parts = np.split(values, [heads * width, (heads + key_heads) * width])
    grouped = [part.reshape(key_heads, -1, *values.shape[1:]) for part in parts]
    return np.concatenate(grouped, axis=1).reshape(values.shape)


def _processed(values: Any, name: str, processor: Any, names: Mapping[str, str]) -> Tensor:
    """Return a weight as transformers stores it."""
    aside: dict[str, dict[str, Tensor]] = {"tensors": {}}
    found = processor.process(weights=values, name=name, tensor_key_mapping=names, parsed_parameters=aside)
    if found.name is None:  # the processor has put the weight aside under its name in transformers
        ((_, weight),) = aside["tensors"].items()
        return weight.float()
    return torch.tensor(found.weights, dtype=torch.float32)
