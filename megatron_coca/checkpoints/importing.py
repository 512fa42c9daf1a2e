"""Importing any readable checkpoint as one of ours that holds weights only.

Weights are copied one at a time, so that memory does not depend on the size of the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from megatron_coca.atomic_write import atomic_dir, refuse_existing
from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.compare import changes_of
from megatron_coca.checkpoints.files import CheckpointError, read_json_if_present
from megatron_coca.checkpoints.huggingface_import import CONFIG, GENERATION, is_huggingface_folder
from megatron_coca.checkpoints.load import Overrides, load_weights, open_checkpoint
from megatron_coca.checkpoints.tokenizer import KEYS as TOKENIZER_KEYS
from megatron_coca.checkpoints.weights import DTYPES, Weights, write_safetensors
from megatron_coca.config import COMPUTE_KEYS, KEYS, Config, load_config
from megatron_coca.config.schema import default_of
from megatron_coca.data.tokenizers.kinds import DESCRIPTION
from megatron_coca.model import empty_model


@dataclass(frozen=True)
class Imported:
    """Result of an import.

    Attributes:
        folder: save folder with one checkpoint, of step 0.
        config: of the model.
        parameters: of the model.
        tokenizer_note: why the tokenizer, or its end of text, could not be used, or None.
        behaviour_note: tokenizer and generation settings of a Hugging Face folder that are not kept, or None.
        changes: what the overrides changed, one line for each key.
    """

    folder: Path
    config: Config
    parameters: int
    tokenizer_note: str | None
    behaviour_note: str | None
    changes: tuple[str, ...]


def import_checkpoint(
    source: str | Path, folder: str | Path, overrides: Overrides = (), dtype: str | None = None
) -> Imported:
    """Write a checkpoint as a save folder of ours with one step that holds weights only, atomically.

    Args:
        source: any checkpoint that `open_checkpoint` reads.
        folder: must not exist.
        overrides: as for `load_model`; `pos_emb=coca` for GPT-NeoX folders of CoCA's authors.
        dtype: of the weights; by default that of the source, with equal bits.

    Raises:
        CheckpointError: the source is invalid or in an unknown format, its weights do not fit its configuration, or
            `folder` exists or cannot be written.
        ConfigError: an invalid override.
        DataError: the tokenizer of a checkpoint of ours is damaged.
    """
    folder = Path(folder)
    refuse_existing(folder, CheckpointError)
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not known; known: {', '.join(DTYPES)}")
    opened = open_checkpoint(source)
    config, weights = opened.configure(overrides), opened.weights()
    changes = changes_of(overrides, opened.trained, config)
    check_fit(config, weights)
    tokenizer, tokenizer_note = opened.tokenizer(overrides)
    imported = {"source": opened.folder.resolve().name, "identity": opened.identity, "step": opened.step}
    note = None
    if is_huggingface_folder(opened.folder):
        note = behaviour_note(opened.folder, tokenizer.eod if tokenizer is not None else None)
        keys = native.read_json(opened.folder / CONFIG)
        imported |= {name: keys.get(name) for name in ("model_type", "transformers_version")}
    with atomic_dir(folder, CheckpointError) as partial:
        step = native.begin(partial, 0)
        with weights.shown(f"importing {source}") as shown:
            write_safetensors(step / native.WEIGHTS, shown if dtype is None else shown.to(DTYPES[dtype]))
        if tokenizer is not None:
            tokenizer.save(step / native.TOKENIZER)
            final = native.step_folder(folder, 0) / native.TOKENIZER
            config = config.override(_tokenizer_keys(step / native.TOKENIZER, final))
        (step / native.CONFIG).write_text(config.to_yaml())
        imported = {name: value for name, value in imported.items() if value is not None}
        meta = {"step": 0, "imported": imported, "versions": native.code_versions()}
        native.write_json(step / native.META, meta)
        native.commit(partial, 0, holds=native.WEIGHTS_ONLY)
    parameters = sum(prod(entry.shape) for entry in weights.entries.values())
    return Imported(folder, config, parameters, tokenizer_note, note, changes)


def starting_config(folder: str | Path) -> Config:
    """Return the configuration of a run that starts from the weights in `folder`: its network, positions and
    tokenizer, with `load` and `finetune`.

    Raises CheckpointError as `open_checkpoint`.
    """
    opened = open_checkpoint(folder, verify=False)
    flat, vocabulary = opened.trained.flat(), opened.folder / "tokenizer.json"
    keys = {
        key: flat[key]
        for key, place in KEYS.items()
        if place.group in ("model", "position") and key not in COMPUTE_KEYS and flat[key] != default_of(key, flat)
    }
    keys |= {key: flat[key] for key in TOKENIZER_KEYS if flat[key] is not None}
    if is_huggingface_folder(opened.folder) and vocabulary.is_file():
        keys |= {"tokenizer_type": "HFTokenizer", "vocab_file": str(vocabulary)}
    return load_config([], keys | {"load": str(folder), "finetune": True})


def check_fit(config: Config, weights: Weights) -> None:
    """Raise CheckpointError, naming every weight that is missing, unexpected or of another shape in the model."""
    plain = config.override({"attention_backend": "auto", "operand_kernel": "torch"})  # nothing is computed
    model = empty_model(plain, "cpu", training=False, memory="meta")
    load_weights(model, replace(weights, read=lambda name: weights.entries[name].stand_in()))


def _tokenizer_keys(saved: Path, final: Path) -> dict[str, str | None]:
    """The keys that name a saved tokenizer by its final location, or only its type where another end of text than the
    default was chosen, which keys cannot say.
    """
    description = native.read_json(saved / DESCRIPTION)
    files = {key: description.get(key) for key in ("vocab_file", "merge_file")}
    if "eod_symbol" in description:
        files = dict.fromkeys(files)
    return {"tokenizer_type": description["tokenizer_type"]} | {
        key: str(final / name) if name else None for key, name in files.items()
    }


ADDING_PROCESSORS = frozenset({"BertProcessing", "RobertaProcessing"})
"""Post-processors of a tokenizer.json that always add special tokens; TemplateProcessing does where it names some."""

KEPT_DEFAULTS = frozenset(
    {"do_sample", "bos_token_id", "eos_token_id", "pad_token_id", "suppress_tokens", "transformers_version"}
)
"""Keys of generation_config.json that an export itself writes; a name that begins with `_` is not a setting."""


def behaviour_note(folder: Path, end: int | None) -> str | None:
    """What a Hugging Face folder's tokenizer and generation files do besides giving ids; None for nothing.

    `end` is the token that ends texts after an import, None where no tokenizer is taken. Raises CheckpointError if one
    of its files is not a JSON mapping.
    """
    names = ("tokenizer.json", "tokenizer_config.json", GENERATION)
    vocabulary, settings, generation = (read_json_if_present(folder / name) for name in names)
    special = {token.get("id") for token in vocabulary.get("added_tokens") or [] if token.get("special")}
    declared = settings.get("added_tokens_decoder") or {}
    special |= {int(number) for number, token in declared.items() if token.get("special")}
    eos = generation.get("eos_token_id")
    sampling = generation.get("do_sample") or (isinstance(eos, list) and len(eos) > 1)
    others = {name for name in generation if not name.startswith("_")} - KEPT_DEFAULTS
    behaviours = {
        "a chat template": (folder / "chat_template.jinja").is_file() or settings.get("chat_template"),
        "special tokens that it adds around texts": _adds_tokens(folder, vocabulary, settings),
        "special tokens within texts": special - {end} or settings.get("extra_special_tokens"),
        "generation defaults": sampling or others,
    }
    listed = ", ".join(name for name, present in behaviours.items() if present)
    return f"{folder}: also has {listed}; export with --tokenizer {folder} to keep them" if listed else None


def _adds_tokens(folder: Path, vocabulary: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    if settings.get("add_bos_token") or settings.get("add_eos_token"):
        return True
    if not vocabulary and (folder / "tokenizer.model").is_file():
        # transformers' class for LLaMA begins every text with BOS unless this is disabled.
        return str(settings.get("tokenizer_class")).startswith("Llama") and settings.get("add_bos_token") is None
    return _processor_adds(vocabulary.get("post_processor") or {})


def _processor_adds(processor: Mapping[str, Any]) -> bool:
    return (
        processor.get("type") in ADDING_PROCESSORS
        or any("SpecialToken" in step for step in processor.get("single") or [])
        or any(map(_processor_adds, processor.get("processors") or []))
    )
