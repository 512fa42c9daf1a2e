"""Find the text network inside a model that also reads images or sound: its configuration and the names of its weights.

`WRAPPERS` lists the supported classes of transformers. The text network is an architecture that `config_json.py` reads.
Its logits are those of the whole model for an input of text only.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.huggingface.rope import without_axes

Json = Mapping[str, Any]
TEXT, TIED, HEAD = "text_config", "tie_word_embeddings", "lm_head.weight"


class TextType(NamedTuple):
    """A text network.

    Attributes:
        kind: the `model_type` of a whole model that consists of the same network.
        defaults: key that a wrapper's config.json may omit -> the class's default. Keys are listed if the config.json
            of a whole model must have them, or if their default differs from that of `kind`.
        rope: the default of the rotary base, if it differs from that of `kind`.
    """

    kind: str
    defaults: Json = {}
    rope: float | None = None


def _sizes(
    vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, keys: int, length: int
) -> dict[str, int]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": length,
    }


_QWEN2_VL = _sizes(152064, 8192, 29568, 80, 64, 8, 32768) | {"rms_norm_eps": 1e-5, "max_window_layers": 80}
TEXT_TYPES: dict[str, TextType] = {
    "llama": TextType("llama", _sizes(32000, 4096, 11008, 32, 32, 32, 2048)),
    "mistral": TextType("mistral", _sizes(32000, 4096, 14336, 32, 32, 8, 131072)),
    "ministral3": TextType("ministral3", _sizes(131072, 4096, 14336, 34, 32, 8, 262144)),
    "qwen2": TextType("qwen2", _sizes(151936, 4096, 22016, 32, 32, 32, 32768)),
    "qwen3": TextType("qwen3", _sizes(151936, 4096, 22016, 32, 32, 32, 32768)),
    "gemma3_text": TextType("gemma3_text", _sizes(262208, 2304, 9216, 26, 8, 4, 131072)),
    "gemma4_text": TextType("gemma4_text", _sizes(262144, 2304, 9216, 30, 8, 4, 131072)),
    "gemma4_unified_text": TextType("gemma4_unified_text", _sizes(262144, 2304, 9216, 30, 8, 4, 262144)),
    "cohere2": TextType("cohere2", _sizes(256000, 8192, 22528, 40, 64, 64, 8192)),
    "cohere_compass_text": TextType("cohere_compass_text", _sizes(256000, 8192, 22528, 40, 64, 64, 8192)),
    "llama4_text": TextType("llama4_text", _sizes(202048, 5120, 8192, 48, 40, 8, 131072)),
    "emu3_text_model": TextType(
        "llama",
        _sizes(184622, 4096, 14336, 32, 32, 8, 9216) | {"rms_norm_eps": 1e-5, "attention_dropout": 0.1},
        1e6,
    ),
    "persimmon": TextType(
        "persimmon",
        {
            "vocab_size": 262144,
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "max_position_embeddings": 16384,
        },
        25000.0,
    ),
    "phi3": TextType("phi3", _sizes(200064, 3072, 8192, 32, 32, 8, 131072)),
    "qwen2_vl_text": TextType("qwen2", _QWEN2_VL, 1e6),
    "qwen2_5_vl_text": TextType("qwen2", _QWEN2_VL, 1e6),
    "qwen3_vl_text": TextType("qwen3", _sizes(151936, 4096, 22016, 32, 32, 32, 128000), 5e5),
    "mllama_text_model": TextType(
        "llama", _sizes(128256, 4096, 14336, 40, 32, 8, 131072) | {"rms_norm_eps": 1e-5}, 5e5
    ),
}
"""`model_type` of a text network inside a wrapper. Types that are not listed keep their name and have no defaults."""

FLAT = re.compile(r".*(vision|image|video|audio|speech).*|text_config|patch_size|num_channels|embd_layer|img_processor")
"""Pattern of the wrapper's own keys. It is used if the text network's keys are at the top level of config.json, too."""
WRAPPERS: dict[str, str] = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "cohere_compass": "cohere_compass_text",
    "deepseek_vl": "llama",
    "emu3": "emu3_text_model",
    "fuyu": "persimmon",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "got_ocr2": "qwen2",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "mllama": "mllama_text_model",
    "moss_transcribe_diarize": "qwen3",
    "phi4_multimodal": "phi3",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "smolvlm": "llama",
    "video_llava": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
"""`model_type` of a wrapper -> the default `model_type` of its text network."""
OUTER = ("dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that apply to the text network even when they stand at the top level of config.json, outside its section."""

LEFT_OUT = {
    "aya_vision": "logit_scale",
    "cohere2_vision": "logit_scale",
    "gemma3": "final_logit_softcapping",
}
"""Wrapper -> a key of the text network's head that the wrapper's class ignores in transformers 5.23."""

_PARTS = r"(?:layers|embed_tokens|norm|final_layernorm)\."
_INNER = re.compile(rf"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?={_PARTS})")
_HEAD = re.compile(r"^(?:language_model|text_model)\.(?=lm_head\.)")
_PLAIN = re.compile(rf"model\.{_PARTS}|lm_head\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Network:
    """The description of one network in a folder.

    Attributes:
        settings: the content of a config.json for this network.
        wrapper: the `model_type` of the wrapper, or None if the network is the whole model.
        skipped: layers that have no effect on text. The remaining layers are numbered without gaps.
        rows: the number of embedding rows to read, or None for all rows.
        applied: keys in `settings` that the wrapper's class ignores and the class of the text network applies.
    """

    settings: Json
    wrapper: str | None = None
    skipped: frozenset[int] = frozenset()
    rows: int | None = None
    applied: tuple[str, ...] = ()

    def rename(self, name: str) -> str | None:
        """Return the name of a weight in the network, or None if the network does not have the weight."""
        if self.wrapper is None:
            return name
        plain = _INNER.sub("model.", name, count=1) if _INNER.match(name) else _HEAD.sub("", name, count=1)
        if not _PLAIN.match(plain):
            return None
        if not self.skipped or (found := _LAYER.fullmatch(plain)) is None:
            return plain
        number = int(found[1])
        before = sum(skipped < number for skipped in self.skipped)
        return None if number in self.skipped else f"model.layers.{number - before}.{found[2]}"


def find_network(values: Json, source: Path, weights: Callable[[], Collection[str]] = tuple) -> Network:
    """Return the text network that a config.json describes, which may be the whole model.

    `values` is the content of config.json, and `source` is its path, for messages. `weights` returns the names of the
    weights. Raises CheckpointError if the description of a wrapper is not valid.
    """
    wrapper = str(values.get("model_type"))
    inner = values.get(TEXT)
    if wrapper not in WRAPPERS:
        return Network(values)
    if inner is None:
        inner = {name: value for name, value in values.items() if not FLAT.fullmatch(name)} | {"model_type": None}
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{source}: {TEXT}: expected a mapping, got {inner!r:.80}; download the folder again")
    named = inner.get("model_type") or WRAPPERS[wrapper]
    text = TEXT_TYPES.get(str(named)) or TextType(str(named))
    outer = {name: values[name] for name in OUTER if values.get(name) is not None}
    given = {name: value for name, value in inner.items() if value is not None or name not in text.defaults}
    settings = {**text.defaults, **outer, **given, "model_type": text.kind}
    settings |= {
        name: without_axes(settings[name]) for name in ("rope_parameters", "rope_scaling") if settings.get(name)
    }
    if text.rope is not None and not _has_base(settings):
        settings["rope_theta"] = text.rope
    applied = tuple(name for name in (LEFT_OUT.get(wrapper),) if name is not None and settings.get(name) is not None)
    network = Network(settings, wrapper, applied=applied)
    tied = values.get(TIED) if values.get(TIED) is not None else inner.get(TIED)
    if tied is None:  # the class ties the head unless the folder has a head
        tied = HEAD not in {network.rename(name) for name in weights()}
    settings[TIED] = tied
    return _without_images(network, source) if named == "mllama_text_model" else network


def _has_base(settings: Json) -> bool:
    sections = (settings, *(settings.get(name) or {} for name in ("rope_parameters", "rope_scaling")))
    return any(isinstance(section, Mapping) and section.get("rope_theta") is not None for section in sections)


def _without_images(network: Network, source: Path) -> Network:
    """Return the text network of Llama 3.2 Vision without its layers that attend to an image.

    The class skips these layers if there is no image. The embedding has rows for image tokens after the vocabulary.
    """
    settings = dict(network.settings)
    listed = settings.pop("cross_attention_layers", None)
    count = settings["num_hidden_layers"]
    layers = range(3, 40, 5) if listed is None else listed
    if not isinstance(count, int) or not all(isinstance(each, int) and 0 <= each < count for each in layers):
        raise CheckpointError(
            f"{source}: cross_attention_layers: {listed!r:.80} is not valid; download the folder again"
        )
    skipped = frozenset(layers)
    settings["num_hidden_layers"] = count - len(skipped)
    return Network(settings, network.wrapper, skipped, settings["vocab_size"])
