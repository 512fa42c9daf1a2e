"""Import a checkpoint of any layout as a native checkpoint with weights only.

Weights are copied one at a time, so memory use does not depend on the size of the model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.load import ignored_names, open_checkpoint
from megatron_coca.checkpoints.opened import Overrides, check_fit
from megatron_coca.checkpoints.tokenizer import KEYS as TOKENIZER_KEYS
from megatron_coca.checkpoints.weights import DTYPES, write_safetensors
from megatron_coca.config import COMPUTE_KEYS, Config, load_config
from megatron_coca.config.schema import MODEL_KEYS, not_at_default
from megatron_coca.data.tokenizers import Tokenizer, load_saved_tokenizer
from megatron_coca.data.tokenizers.kinds import DESCRIPTION, PROBES
from megatron_coca.data.tokenizers.losses import sampled
from megatron_coca.support.errors import InputError
from megatron_coca.support.regular_files import read_regular
from megatron_coca.work.folders import atomic_dir, require_new


@dataclass(frozen=True)
class Imported:
    """Result of an import.

    Attributes:
        folder: save folder with one checkpoint, of step 0.
        config: configuration of the model.
        parameters: number of parameters.
        tokenizer_note: a problem of the tokenizer, or None. The note states why the tokenizer or its end-of-text token
            could not be used, or which text the tokenizer does not preserve.
        huggingface_folder: the source folder if it is a Hugging Face folder, else None.
    """

    folder: Path
    config: Config
    parameters: int
    tokenizer_note: str | None
    huggingface_folder: Path | None


def import_checkpoint(
    source: str | Path, folder: str | Path, overrides: Overrides = (), dtype: str | None = None
) -> Imported:
    """Write a checkpoint atomically as a native save folder with one step, which has weights only.

    Args:
        source: any checkpoint that `open_checkpoint` reads.
        folder: the folder to write. If it exists and holds this import already, nothing is written.
        overrides: config overrides, as for `load_model`. GPT-NeoX folders by CoCA's authors need `pos_emb=coca`.
        dtype: dtype of the written weights. By default, they are copied bit by bit.

    Raises:
        CheckpointError: the source is invalid or has an unknown format, its weights do not fit its configuration, or
            `folder` has other content or cannot be written.
        ConfigError: an override is invalid.
        DataError: the tokenizer of a native checkpoint is damaged.
    """
    folder = Path(folder)
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype: {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    opened = open_checkpoint(source, overrides=overrides)
    config, weights = opened.configure(overrides), opened.weights()
    check_fit(config, weights)
    tokenizer, tokenizer_note = opened.tokenizer(overrides)
    if tokenizer is not None and (loss := sampled(tokenizer, filter(None, PROBES)).loss(tokenizer.vocab_size)):
        tokenizer_note = "; ".join(filter(None, (tokenizer_note, f"the tokenizer loses text: {loss}")))
    imported: dict[str, Any] = {
        "source": opened.folder.resolve().name,
        "identity": opened.identity,
        "step": opened.step,
        "dtype": dtype,
    }
    theirs = opened.folder if opened.settings is not None else None
    if opened.settings is not None:
        imported |= {name: opened.settings.get(name) for name in ("model_type", "transformers_version")}
        imported["ignored_keys"] = list(ignored_names(overrides)) or None
    imported = {name: value for name, value in imported.items() if value is not None}
    parameters = sum(prod(entry.shape) for entry in weights.entries.values())
    final = native.step_folder(folder, 0)
    if folder.exists():
        config = _configured(config, tokenizer, final / native.TOKENIZER, final / native.TOKENIZER)
        _require_same(folder, config, tokenizer, imported)
        return Imported(folder, config, parameters, tokenizer_note, theirs)
    with atomic_dir(folder, CheckpointError) as partial:
        step = native.begin(partial, 0)
        with weights.shown(f"importing {source}") as shown:
            write_safetensors(step / native.WEIGHTS, shown if dtype is None else shown.to(DTYPES[dtype]))
        if tokenizer is not None:
            tokenizer.save(step / native.TOKENIZER)
        config = _configured(config, tokenizer, step / native.TOKENIZER, final / native.TOKENIZER)
        (step / native.CONFIG).write_text(config.record(), encoding="utf-8")
        meta = {"step": 0, "imported": imported, "versions": native.code_versions()}
        native.write_json(step / native.META, meta)
        native.commit(partial, 0, holds=native.WEIGHTS_ONLY)
    return Imported(folder, config, parameters, tokenizer_note, theirs)


def _configured(config: Config, tokenizer: Tokenizer | None, saved: Path, final: Path) -> Config:
    """Add the tokenizer's keys to a configuration. The tokenizer is now in `saved` and will be moved to `final`."""
    return config if tokenizer is None or not saved.is_dir() else config.override(_tokenizer_keys(saved, final))


def _require_same(folder: Path, config: Config, tokenizer: Tokenizer | None, imported: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless an earlier process has written the same import to `folder`."""
    step = native.step_folder(folder, 0)
    try:
        same = native.read_json(step / native.META).get("imported") == json.loads(json.dumps(imported))
        same = same and read_regular(step / native.CONFIG) == config.record().encode()
        saved = step / native.TOKENIZER
        found = load_saved_tokenizer(saved).fingerprint if saved.is_dir() else None
        same = same and found == (None if tokenizer is None else tokenizer.fingerprint)
    except (OSError, InputError):
        same = False
    if not same:
        require_new(folder, CheckpointError)


def starting_config(folder: str | Path, overrides: Overrides = (), files: Sequence[str | Path] = ()) -> Config:
    """Return the configuration for a run that starts from the weights in `folder`, with the user's files and overrides.

    The configuration has the network, position and tokenizer keys of the checkpoint, and sets `load` and `finetune`.
    `open_checkpoint` describes the arguments. Raises the errors of that function, and ConfigError.
    """
    opened = open_checkpoint(folder, verify=False, overrides=overrides, files=files)
    flat, vocabulary = opened.trained.flat(), opened.folder / "tokenizer.json"
    keys = not_at_default((key for key in MODEL_KEYS if key not in COMPUTE_KEYS), flat)
    keys |= {key: flat[key] for key in TOKENIZER_KEYS if flat[key] is not None}
    # The tokenizer determines the number of ids, and the embedding determines the number of rows.
    rows = opened.trained.model.padded_vocab_size
    keys |= {"vocab_size": opened.known_ids(), "make_vocab_size_divisible_by": rows}
    if opened.settings is not None and vocabulary.is_file():
        keys |= {"tokenizer_type": "HFTokenizer", "vocab_file": str(vocabulary)}
    config = load_config([], keys | {"load": str(folder), "finetune": True}).override(overrides, files)
    # Prepared data record the tokenizer's size, which may include added tokens that the embedding lacks.
    tokenizer = opened.tokenizer().tokenizer
    if tokenizer is not None and tokenizer.rows is not None and config.model.vocab_size == tokenizer.vocab_size:
        return config.override({"vocab_size": opened.known_ids()})
    return config


def _tokenizer_keys(saved: Path, final: Path) -> dict[str, str | None]:
    """Return the configuration keys that refer to the tokenizer saved in `saved`, with paths in `final`.

    If its end-of-text token is not the default, only the type is set, because no key can select another end-of-text
    token.
    """
    description = native.read_json(saved / DESCRIPTION)
    files = {key: description.get(key) for key in ("vocab_file", "merge_file")}
    if "eod_symbol" in description:
        files = dict.fromkeys(files)
    return {"tokenizer_type": description["tokenizer_type"]} | {
        key: str(final / name) if name else None for key, name in files.items()
    }
