"""Export checkpoints as folders for Hugging Face transformers, which computes the same logits.

The export uses a stock architecture if it can represent the model. Otherwise, it saves a modelling file with the
weights (model_source.py).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_coca.attention.positions.clex import Clex
from megatron_coca.checkpoints.compare import comparable, contradicts
from megatron_coca.checkpoints.export_check import LONG, check_folder, excerpt
from megatron_coca.checkpoints.files import CheckpointError, json_bytes
from megatron_coca.checkpoints.huggingface import weight_map
from megatron_coca.checkpoints.huggingface.config_json import (
    CONFIG,
    LATER_KEYS,
    LAYERS,
    LEARNED_ROWS,
    LIMITS,
    MLPS,
    NETWORK,
    NETWORK_KEYS,
    OURS,
    POSITION,
    POSITION_KEYS,
    dense_rows,
    parse_config,
    read_config,
)
from megatron_coca.checkpoints.huggingface.families import FAMILIES, gpt_neox, llama
from megatron_coca.checkpoints.huggingface.families.parts.keys import Exporter, write_keys
from megatron_coca.checkpoints.huggingface.model_card import CARD, CardNotes, model_card
from megatron_coca.checkpoints.huggingface.model_source import TEMPLATE, NotCarriedError, modelling_file
from megatron_coca.checkpoints.huggingface.read import GENERATION, SINGLE, open_folder
from megatron_coca.checkpoints.huggingface.rope import MAXIMUM, TRAINING_LENGTH
from megatron_coca.checkpoints.huggingface.tokenizer_files import (
    TokenIds,
    TokenizerFiles,
    end_ids,
    original_files,
    own_files,
    suppress_tokens,
    tokenizer_files,
)
from megatron_coca.checkpoints.huggingface.transformers_check import Written, check_transformers
from megatron_coca.checkpoints.opened import OpenedCheckpoint
from megatron_coca.checkpoints.tokenizer import KEYS as TOKENIZER_KEYS
from megatron_coca.checkpoints.unsupported import SHAPE_KEYS, lost_keys
from megatron_coca.checkpoints.weights import DTYPES, Weights, open_safetensors_file, write_safetensors
from megatron_coca.config import Config
from megatron_coca.config.model import GLOBAL
from megatron_coca.config.position import ORIGINAL, LayerType, PositionConfig, Selected
from megatron_coca.config.schema import not_at_default
from megatron_coca.config.source import Overrides, given_values
from megatron_coca.data.tokenizers.text_rules import token_ids
from megatron_coca.work.folders import atomic_dir, is_complete, scratch_dir

MODELLING_FILE = TEMPLATE.name

# Architectures --------------------------------------------------------------------------------------------------------

MutableJson = dict[str, Any]


def _our_keys(config: Config, shared: MutableJson) -> MutableJson:
    flat, classes = config.flat(), {"Config": "Config", "Model": "Model", "ModelForCausalLM": "ForCausalLM"}
    plain = {"rope_type": "default", "rope_theta": config.position.rotary_emb_base}  # for the stock class's rotation
    keys = llama.llama_keys(config, shared)
    without = {name: value for name, value in keys.items() if name not in ("rope_scaling", ORIGINAL)}
    return without | {
        "rope_parameters": plain,
        NETWORK: {name: flat[name] for name in NETWORK_KEYS} | not_at_default(LATER_KEYS, flat) | _mlps(config),
        "auto_map": {f"Auto{name}": f"{TEMPLATE.stem}.CocaDense{end}" for name, end in classes.items()},
    }


def _mlps(config: Config) -> MutableJson:
    return {MLPS: list(config.model.mlp_names)} if config.model.mixtures else {}


def family_exporter(kind: str) -> Exporter:
    """Return the exporter for a row of `FAMILIES`."""
    family = FAMILIES[kind]
    return Exporter(
        family.architecture,
        lambda config: family.rows(config.model),
        lambda config, shared: write_keys(family, config, shared),
    )


EXPORTERS: dict[str, Exporter] = {
    "gpt_neox": gpt_neox.EXPORTER,
    "llama": llama.EXPORTER,
    **{kind: family_exporter(kind) for kind, family in FAMILIES.items() if family.architecture},
    OURS: Exporter("CocaDenseForCausalLM", lambda config: dense_rows(config.flat() | _mlps(config)), _our_keys),
}
"""`model_type` -> exporter. The first exporter that can represent a model is used; the last supports all other models.
"""


def _fits(kind: str, config: Config, described: Mapping[str, Any]) -> bool:
    """Return whether an architecture can represent a model: the import of its config.json gives the same model.

    `described` is `comparable(config)`.
    """
    written = {"model_type": kind} | EXPORTERS[kind].keys(config, _shared_keys(config, kind))
    try:
        # Validation takes most of the time, and most architectures differ in a key that can be compared without it.
        keys, _ = read_config(written, Path(CONFIG), warn=False)
        if contradicts(described, keys):
            return False
        return comparable(parse_config(written, Path(CONFIG), warn=False)) == described
    except CheckpointError:
        return False


MIXED = ("mlp_config", "moe_expert_interval")
"""Keys that determine MLPS."""
WRITTEN = SHAPE_KEYS | {*NETWORK_KEYS, *LATER_KEYS, *POSITION_KEYS, *LIMITS, *MIXED, "kv_channels", "layer_types"}
"""Keys that the exporter of our modelling file writes."""


# config.json ----------------------------------------------------------------------------------------------------------


def describe(config: Config, kind: str, ids: TokenIds, weights: Weights) -> dict[str, dict[str, Any]]:
    """Return the contents of config.json and generation_config.json, by file name.

    `weights` are the weights to export, under our names.
    """
    model, exporter = config.model, EXPORTERS[kind]
    settings = {
        "model_type": kind,
        "architectures": [exporter.architecture],
        "dtype": str(next(iter(weights.entries.values())).dtype).removeprefix("torch."),
        "initializer_range": model.init_method_std,
        **{f"{name}_token_id": value for name, value in ids._asdict().items()},
        **exporter.keys(config, _shared_keys(config, kind)),
    }
    settings |= {POSITION: describe_position(config, weights)} if kind == OURS else {}
    # The end-of-text token replaces a missing padding token only in generation_config.json. In config.json, it would
    # freeze that row of the embedding.
    end = ids.eos[0] if isinstance(ids.eos, list) else ids.eos
    generation = {"do_sample": False, "eos_token_id": ids.eos, "pad_token_id": end if ids.pad is None else ids.pad}
    generation |= {"bos_token_id": ids.bos} if ids.bos is not None else {}
    padding = list(range(model.vocab_size or model.padded_vocab_size, model.padded_vocab_size))
    generation |= {"suppress_tokens": padding} if padding else {}
    return {CONFIG: settings, GENERATION: generation}


def _shared_keys(config: Config, kind: str) -> dict[str, Any]:
    """Return the keys of config.json that all architectures have, under their common names."""
    model, length = config.model, _max_position_embeddings(config, kind)
    return {
        "vocab_size": model.padded_vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": length,
        "tie_word_embeddings": not model.no_weight_tying,
        "attention_dropout": model.attention_dropout,
    } | ({TRAINING_LENGTH: model.seq_length} if length != model.seq_length else {})


def _max_position_embeddings(config: Config, kind: str) -> int:
    """Return the value of max_position_embeddings.

    This is the training length, unless the stock class uses the key for another length.
    """
    trained, original = config.model.seq_length, config.position.original_length(config.model.seq_length)
    if config.position.embedding.weights == "table" and kind in FAMILIES:
        return config.model.max_position_embeddings - config.model.opt_pos_emb_offset
    measured = config.position.extension.stock.length if kind != OURS else None
    if measured == ORIGINAL and config.position.extension.name == "longrope" and config.position.rope_scaling:
        extended = config.position.rope_scaling.factor * original
        if extended == int(extended):  # transformers 4 computes the factor from the two lengths
            return int(extended)
    return {ORIGINAL: max(trained, original), MAXIMUM: original, None: trained}[measured]


@torch.no_grad()
def describe_position(config: Config, weights: Weights) -> dict[str, Any]:
    """Return the section `position` of config.json. This is the inverse of `position_keys`. `weights` have our names.

    The section also contains the defaults that follow from the training length, and the frequencies that CLEX has
    learned, because the modelling file can compute neither.
    """
    section = _position_section(config, config.position)
    position, length = config.position, config.model.seq_length
    if [*config.layer_types] != [GLOBAL]:
        section[LAYERS] = list(config.model.layer_names)
        # A type has the model's values for missing keys, so a limit that does not apply to it is written as null.
        kinds = {
            name: dict.fromkeys(LIMITS) | _position_section(config, own) for name, own in config.layer_types.items()
        }
        section["layer_types"] = {
            name: {key: value for key, value in own.items() if key in LayerType.model_fields}
            for name, own in kinds.items()
            if name != GLOBAL
        }
    if position.pos_emb == "learned":
        section[LEARNED_ROWS] = config.model.max_position_embeddings
    if (scaling := position.rope_scaling) is not None and position.extension.learned:
        dim = 2 * position.frequency_count(config.model.head_dim)
        original = position.original_length(length)
        clex = Clex(dim, position.rotary_emb_base, original, scaling.max_factor, scaling.ode_step)
        clex.up.copy_(weights.read("positions.clex.up"))
        clex.down.copy_(weights.read("positions.clex.down"))
        factors = range(1, scaling.max_factor + 1)
        section["clex_frequencies"] = [clex.inverse_frequencies(t).tolist() for t in factors]
    return section


def _position_section(config: Config, position: PositionConfig) -> dict[str, Any]:
    """Return the keys of the section `position` for one layer type."""
    length = config.model.seq_length
    section = {name: value for name, value in position.model_dump().items() if name in POSITION_KEYS}
    section |= {name: value for name in LIMITS if (value := getattr(position, name)) is not None}
    if (scaling := position.rope_scaling) is not None:
        section["rope_scaling"] = _without_none(scaling.model_dump() | scaling.settings(length))
    if (frequencies := position.rotary_frequencies) is not None:
        options = frequencies.settings(position.original_length(length))
        section["rotary_frequencies"] = {"type": frequencies.type} | options
    if (distances := position.relative_positions) is not None:
        section["relative_positions"] = _without_none({"type": distances.type} | distances.settings(length))
    if isinstance(factor := position.logit_scaling, Selected):
        section["logit_scaling"] = {"type": factor.type} | factor.settings(length)
    return section


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


# Export ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    """Result of an export.

    Attributes:
        folder: the exported folder.
        model_type: model_type in config.json.
        tokenizer_note: a note about tokenizer behaviour that the export does not preserve, or None.
        compared: the program that computed the export's logits for the comparison with the source.
    """

    folder: Path
    model_type: str
    tokenizer_note: str | None
    compared: str

    @property
    def remote(self) -> bool:
        """Whether the folder has a modelling file and must be loaded with `trust_remote_code=True`."""
        return self.model_type == OURS


def push(folder: Path, name: str) -> str:
    """Upload an exported folder to a repository on the Hugging Face Hub, which is created as private if it is missing.

    Return the URL of the repository. Raises CheckpointError if the upload fails; the folder is kept.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise CheckpointError("--push: huggingface_hub is not installed; run `pip install huggingface_hub`") from error
    try:
        api = HfApi()
        made = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Export from megatron_coca")
    except (HfHubHTTPError, OSError, ValueError) as error:
        kept = f"{folder} is complete; log in with `hf auth login`, then run `hf upload {name} {folder}`"
        raise CheckpointError(f"--push {name}: {error}\n{kept}") from error
    return str(made)


def export(
    opened: OpenedCheckpoint,
    folder: Path,
    overrides: Overrides = (),
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    notes: CardNotes | None = None,
) -> Exported:
    """Export a checkpoint as a folder for `transformers.AutoModelForCausalLM.from_pretrained`.

    Args:
        opened: the checkpoint, of any layout.
        folder: the folder to write. After an error it does not exist. If it exists and holds this export already, it is
            compared with the source again, and nothing is written.
        overrides: config overrides, as for `load_model`. An extension becomes part of the export.
        dtype: dtype of the exported weights. By default, they are copied bit by bit.
        tokenizer: Hugging Face folder of the original model. Its tokenizer and generation files and its bos, eos and
            pad ids are copied. Its tokenizer must produce the same ids as the checkpoint's tokenizer.
        notes: facts for the model card.

    Raises:
        CheckpointError: the checkpoint is invalid, the format cannot represent the model, `tokenizer` does not match
            the checkpoint's tokenizer, or `folder` has other content or cannot be written. Nothing is written then.
        ConfigError: an override is invalid.
        DataError: the checkpoint's tokenizer is damaged.
    """
    config = opened.configure(overrides)
    kind = kind_of(opened, config)
    modelling = _modelling_file(config) if kind == OURS else None
    files, ids, note = _select_tokenizer(opened, config, overrides, Path(tokenizer) if tokenizer is not None else None)
    ours = opened.weights() if dtype is None else opened.weights().to(DTYPES[dtype])
    heads = weight_map.heads_of(config)
    rows = weight_map.expand(EXPORTERS[kind].rows(config), config.model.num_layers)
    weights = weight_map.to_foreign_weights(ours, rows, heads)
    contents = describe(config, kind, ids, ours)
    written = dict(files)
    unused = contents[GENERATION].get("suppress_tokens", [])
    if GENERATION in written and unused:
        written[GENERATION] = suppress_tokens(written[GENERATION], unused)
    generation = json.loads(written[GENERATION]) if GENERATION in written else contents[GENERATION]
    ends = token_ids(generation.get("eos_token_id"))
    named = (notes or CardNotes(), ends)
    written[CARD] = model_card(opened, config, contents[CONFIG], weights, folder.name, *named).encode()
    if modelling is not None:
        written[MODELLING_FILE] = modelling
    written = {name: json_bytes(content) for name, content in contents.items()} | written
    if is_complete(folder, written, CheckpointError):
        return Exported(folder, kind, note, _compare_again(folder, kind, config, ours))
    with atomic_dir(folder, CheckpointError) as partial:
        for name, data in written.items():
            (partial / name).write_bytes(data)
        with weights.shown(f"exporting {folder}") as shown:
            write_safetensors(partial / SINGLE, shown, {"format": "pt"})
        compared = _read_back(partial, kind, config, ours, partial)
    return Exported(folder, kind, note, compared)


def _compare_again(folder: Path, kind: str, config: Config, ours: Weights) -> str:
    """Compare an export by an earlier process with the source. Raises CheckpointError if they differ."""
    with scratch_dir(folder, CheckpointError) as scratch:  # a killed process leaves no files in the folder
        try:
            return _read_back(folder, kind, config, ours, scratch)
        except CheckpointError as error:
            raise CheckpointError(
                f"{folder}: exists already ({error}); name a new folder, or remove this one"
            ) from error


def _read_back(folder: Path, kind: str, config: Config, ours: Weights, scratch: Path) -> str:
    """Compare the written folder with the source. Return the program that computed the export's logits. Temporary files
    are in the folder `scratch`.

    Raises CheckpointError if the folder does not match the source.
    """
    check_folder(folder, open_folder, config, ours)
    exporter, family = EXPORTERS[kind], FAMILIES.get(kind)
    common = ("num_hidden_layers", "vocab_size")
    layers, rows = (str(family.names.get(name, name)) if family is not None else name for name in common)
    written = Written(
        folder,
        exporter.architecture,
        MODELLING_FILE if kind == OURS else None,
        open_safetensors_file(folder / SINGLE, folder),
        {row.ours: row.theirs for row in weight_map.expand(exporter.rows(config), config.model.num_layers)},
        (layers, rows),
        family.attention if family is not None else "eager",
    )
    # Stock classes without rotation may have position tables that end at the training length.
    rotates = family is None or family.rope is not None
    part = excerpt(config, ours, LONG if rotates else config.model.seq_length)
    return check_transformers(
        written, part, lambda place, weights: write_safetensors(place / SINGLE, weights, {"format": "pt"}), scratch
    )


def kind_of(opened: OpenedCheckpoint, config: Config) -> str:
    """Return the `model_type` to export: the type of the imported folder if it can represent the model, else the first
    type that can.
    """
    kinds = config.layer_types.values()
    choices = dict.fromkeys(choice for kind in kinds for choice, _ in kind.choices())
    unknown = (choice.not_expressed("huggingface", ("stock", "file"), ("file",)) for choice in choices)
    positions = list(filter(None, unknown))
    stock = [name for name in EXPORTERS if name != OURS] if not positions else []
    origin = opened.settings if opened.settings is not None else opened.imported
    named = [name for name in stock if name == origin.get("model_type")]
    described = comparable(config)
    found = next((name for name in (*named, *stock) if _fits(name, config, described)), None)
    if found is not None:
        return found
    reasons = [*lost_keys(config, WRITTEN), *positions]
    if reasons:
        raise CheckpointError(
            f"{opened.folder}: a Hugging Face folder cannot represent the model: {'; '.join(reasons)}"
        )
    return OURS


def _modelling_file(config: Config) -> bytes:
    try:
        kinds = (config.position, *config.layer_types.values())
        return modelling_file(dict.fromkeys(choice for kind in kinds for choice, _ in kind.choices())).encode()
    except NotCarriedError as error:
        raise CheckpointError(f"a Hugging Face folder cannot represent the model: {error}") from error


def _select_tokenizer(
    opened: OpenedCheckpoint, config: Config, overrides: Overrides, original: Path | None
) -> TokenizerFiles:
    """Return the tokenizer and generation files of the export.

    If `original` is given, they are copied from that folder. Otherwise, if the checkpoint is a Hugging Face folder and
    no override selects a tokenizer, they are copied from the checkpoint. Otherwise, they are built from the
    checkpoint's tokenizer.
    """
    tokenizer, note = opened.tokenizer(overrides)
    if original is not None:
        return original_files(original, tokenizer, config.model.vocab_size or config.model.padded_vocab_size)
    if opened.settings is not None and not set(given_values(overrides)).intersection(TOKENIZER_KEYS):
        own = own_files(opened.folder)
        if own.ids.eos is None and tokenizer is not None:
            own = own._replace(ids=own.ids._replace(eos=end_ids(tokenizer)))
        complete = any("token" in name for name in own.files)
        if complete or tokenizer is None or opened.packed_tokenizer is None:
            return own
        files, differing = tokenizer_files(tokenizer, begun=True)
        given = (opened.settings.get(f"{name}_token_id") for name in TokenIds._fields)
        return TokenizerFiles({**own.files, **files}, TokenIds(*given), differing)
    if tokenizer is None:
        missing = (
            "tokenizer: the checkpoint has none, so the export has no tokenizer and no eos_token_id, and generate() "
            f"always runs to its length limit ({note})"
        )
        return TokenizerFiles({}, TokenIds(), missing)
    files, differing = tokenizer_files(tokenizer, begun=bool(opened.imported) and not opened.step)
    return TokenizerFiles(files, TokenIds(eos=end_ids(tokenizer)), "; ".join(filter(None, (note, differing))) or None)
