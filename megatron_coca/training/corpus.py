"""From the data keys of a configuration to blends of shards."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from megatron_coca.config import Config, ConfigError, split_shares
from megatron_coca.data import (
    Blend,
    DataError,
    Packing,
    Shard,
    Tokenizer,
    ensure_builtin,
    load_saved_tokenizer,
    load_tokenizer,
)
from megatron_coca.data.tokenizers.kinds import DESCRIPTION

BUILTIN_WEIGHTS = {"text": 0.75, "code": 0.25}
"""The paper's mixture by tokens."""
PACKING_KEYS = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")
"""The keys that say what the ends of documents within a sample change."""


@dataclass(frozen=True)
class Corpus:
    """What a run reads.

    Attributes:
        config: the configuration with data paths and vocabulary size filled in.
        train: the order of the training samples.
        valid: the order of the validation samples, or None where no validation data is named.
        tokenizer: what the shards were made with, or None where nothing says (shards of another program, no
        vocab_file).
        packing: what the ends of documents within a sample change.
    """

    config: Config
    train: Blend
    valid: Blend | None
    tokenizer: Tokenizer | None
    packing: Packing = Packing()

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change when a run is resumed: sizes and weights of the sources, the tokenizer, and what the
        ends of documents change.
        """
        identity = {
            "tokens": [shard.len_tokens for shard in self.train.shards],
            "weights": list(self.train.weights),
            "tokenizer": self.tokenizer.fingerprint if self.tokenizer else None,
        }
        # Left out where nothing is changed, so that checkpoints from before these keys can be resumed.
        changed = [name for name in PACKING_KEYS if getattr(self.config.data, name)]
        return identity | ({"documents": changed} if changed else {})


def open_corpus(config: Config) -> Corpus:
    """Open the shards that the configuration names; without any, the built-in corpus, prepared at first use.

    Raises:
        DataError: a shard is missing, damaged, too short, or made with another tokenizer than the rest.
        ConfigError: the tokenizer has more tokens than the model's vocabulary; `eod_mask_loss` without a tokenizer.
    """
    config = _with_paths(config)
    train, valid = _open_shards(config)
    tokenizer = _common_tokenizer(config)
    config = _with_vocabulary(config, tokenizer)
    data, length = config.data, config.model.seq_length
    return Corpus(
        config,
        Blend(train, data.train_data_weights or [1.0] * len(train), length, config.seed),
        Blend(valid, data.valid_data_weights or [1.0] * len(valid), length, config.seed) if valid else None,
        tokenizer,
        _packing(config, tokenizer),
    )


def _packing(config: Config, tokenizer: Tokenizer | None) -> Packing:
    data = config.data
    if data.eod_mask_loss and tokenizer is None:
        raise ConfigError(
            [
                "eod_mask_loss: nothing says which token ends a document, for no tokenizer lies beside the shards; "
                "name theirs with tokenizer_type and vocab_file"
            ]
        )
    masked = tokenizer.eod if data.eod_mask_loss and tokenizer is not None else None
    return Packing(data.reset_attention_mask, data.reset_position_ids, masked)


def _with_paths(config: Config) -> Config:
    """The configuration with the built-in corpus where no data path is given."""
    if config.data.data_path or config.data.train_data_paths:
        return config
    folder = ensure_builtin(Path(config.data.data_root)).parent
    weights = list(BUILTIN_WEIGHTS.values())
    keys: dict[str, Any] = {}
    for split, part in (("train", "train"), ("valid", "test"), ("test", "test")):
        keys[f"{split}_data_paths"] = [str(folder / f"{name}_{part}") for name in BUILTIN_WEIGHTS]
        keys[f"{split}_data_weights"] = weights
    return config.override(keys)


def _open_shards(config: Config) -> tuple[list[Shard], list[Shard]]:
    data = config.data
    if data.train_data_paths:
        return [Shard(path) for path in data.train_data_paths], [Shard(path) for path in data.valid_data_paths or ()]
    assert data.data_path is not None
    shares = split_shares(data.split)
    assert shares is not None, "a configuration holds a split that can be read"
    train, valid, _ = split_shard(Shard(data.data_path), shares)
    if train is None:
        raise DataError(
            f"{data.data_path}: split {data.split!r} leaves no document to train on; change split or add documents"
        )
    return [train], [valid] if valid is not None else []


def split_shard(shard: Shard, shares: Sequence[float]) -> list[Shard | None]:
    """Consecutive parts of a shard by shares of its documents, as GPT-NeoX's `split`; None for a part without
    documents.
    """
    edges = [round(edge / sum(shares) * shard.documents) for edge in accumulate(shares, initial=0.0)]
    return [shard.part(first, last) if last > first else None for first, last in pairwise(edges)]


def _common_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer that lies beside the shards; all of them and `vocab_file`, where given, must agree."""
    found = {}
    data = config.data
    groups = (
        data.train_data_paths,
        data.valid_data_paths,
        data.test_data_paths,
        [data.data_path] if data.data_path else None,
    )
    for prefix in (prefix for group in groups for prefix in group or ()):
        folder = Path(prefix).parent
        if (folder / DESCRIPTION).is_file():
            found[str(folder)] = load_saved_tokenizer(folder)
    if config.data.vocab_file:
        named = load_tokenizer(config.data.tokenizer_type, config.data.vocab_file, config.data.merge_file)
        found[config.data.vocab_file] = named
    if len({tokenizer.fingerprint for tokenizer in found.values()}) > 1:
        raise DataError(
            f"the tokenizers of {', '.join(found)} differ; shards of one run must be made with one tokenizer"
        )
    return next(iter(found.values()), None)


def _with_vocabulary(config: Config, tokenizer: Tokenizer | None) -> Config:
    wanted = config.model.vocab_size
    if wanted is None and tokenizer is not None:
        return config.override({"vocab_size": tokenizer.vocab_size})
    if wanted is not None and tokenizer is not None and tokenizer.vocab_size > wanted:
        raise ConfigError(
            [
                f"vocab_size: {wanted}, but the tokenizer of the data has {tokenizer.vocab_size} tokens; "
                f"set vocab_size={tokenizer.vocab_size} or larger, or leave it out"
            ]
        )
    return config
