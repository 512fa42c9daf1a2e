"""From the data keys of a configuration to blends of shards."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

from megatron_coca.config import Config, ConfigError, split_shares
from megatron_coca.data import (
    Batch,
    Blend,
    DataError,
    Loader,
    Packing,
    Shard,
    SourceShare,
    Tokenizer,
    ensure_builtin,
    load_saved_tokenizer,
    load_tokenizer,
)
from megatron_coca.data.inspection import shard_entry
from megatron_coca.data.preparation.plan import SPLITS
from megatron_coca.data.shards import read_header, sampled_digest
from megatron_coca.data.tokenizers import needs_files
from megatron_coca.data.tokenizers.kinds import DESCRIPTION, agree
from megatron_coca.tables import format_table

logger = logging.getLogger(__name__)


def _digest(value: str | None) -> str:
    return "none" if value is None else value[:12]


def _count(value: int) -> str:
    return f"{value:,}"


_COUNTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "tokens": ("token count", _count),
    "document_counts": ("document count", _count),
    "weights": ("weight", repr),
}
_CONTENTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "sha256": ("content", _digest),
    "sampled": ("content", _digest),
}
"""Entries with a value for every source: what they are called, and how a value is shown."""


def data_identity(blend: Blend) -> dict[str, list[Any]]:
    """What is compared when a run goes on, as JSON can hold it; a list over the sources each.

    `sha256` is what the manifest says of the tokens' file, None where none does: it takes every token into account and
    no reading. `sampled` is taken from the shard itself, so that data without a manifest is known again as well, and
    a file that was replaced under its manifest is not.
    """
    return {
        "tokens": [shard.len_tokens for shard in blend.shards],
        "document_counts": [shard.documents for shard in blend.shards],
        "weights": list(blend.weights),
        "sha256": [_recorded_digest(shard) for shard in blend.shards],
        "sampled": [sampled_digest(shard) for shard in blend.shards],
    }


def _recorded_digest(shard: Shard) -> str | None:
    try:
        return shard_entry(shard.prefix).sha256
    except DataError as error:  # a manifest.json of something else may lie beside a shard of another program
        logger.info("%s; it is known again by some of its tokens instead", error)
        return None


def differing_data(saved: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """What differs between two identities, a phrase each such as `token count of NAME (saved 1,000, now 900)`.

    `names` are those of the sources now.
    """
    before = len(saved.get("tokens") or ())
    if before != len(names):
        return [f"number of sources (saved {before}, now {len(names)})", *_of_the_run(saved, now)]
    found = [line for number, name in enumerate(names) for line in _of_source(saved, now, number, name)]
    return found + _of_the_run(saved, now)


def _of_source(saved: Mapping[str, Any], now: Mapping[str, Any], number: int, name: str) -> list[str]:
    counts = _differing(_COUNTS, saved, now, number, name)
    # Other counts are other content: once is enough.
    return counts or _differing(_CONTENTS, saved, now, number, name)[:1]


def _differing(
    entries: Mapping[str, tuple[str, Callable[[Any], str]]],
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    number: int,
    name: str,
) -> list[str]:
    """Checkpoints of earlier versions lack some entries, and a shard may have no manifest on one side: compared is what
    both have, so that such runs can go on.
    """
    found = []
    for key, (title, shown) in entries.items():
        old, new = (_value(identity, key, number) for identity in (saved, now))
        if old is not None and new is not None and old != new:
            found.append(f"{title} of {name} (saved {shown(old)}, now {shown(new)})")
    return found


def _value(identity: Mapping[str, Any], key: str, number: int) -> Any:
    values = identity.get(key)
    return values[number] if values is not None else None


def _of_the_run(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What belongs to no source: the tokenizer, and what the ends of documents change."""
    found = []
    old, new = saved.get("tokenizer"), now.get("tokenizer")
    # A run that began without a tokenizer may go on once one is named.
    if old is not None and old != new:
        found.append(f"tokenizer (saved {_digest(old)}, now {_digest(new)})")
    if saved.get("documents", []) != now.get("documents", []):
        found.append(f"treatment of documents (saved {_keys(saved)}, now {_keys(now)})")
    return found


def _keys(identity: Mapping[str, Any]) -> str:
    return " and ".join(identity.get("documents", [])) or "as one text"


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
        tokenizer named).
        packing: what the ends of documents within a sample change.
        unverified: prefixes of shards that have no tokenizer beside them, so that nothing shows which made them.
    """

    config: Config
    train: Blend
    valid: Blend | None
    tokenizer: Tokenizer | None
    packing: Packing = Packing()
    unverified: tuple[str, ...] = ()

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What must not change when a run is resumed: sizes, weights and content of the sources, the tokenizer, and
        what the ends of documents change.
        """
        identity = data_identity(self.train) | {"tokenizer": self.tokenizer.fingerprint if self.tokenizer else None}
        # Left out where nothing is changed, so that checkpoints from before these keys can be resumed.
        changed = [name for name in PACKING_KEYS if getattr(self.config.data, name)]
        return identity | ({"documents": changed} if changed else {})


def open_corpus(config: Config) -> Corpus:
    """Open the shards that the configuration names; without any, the built-in corpus, prepared at first use.

    Opening a shard checks the sizes of its files and its index, not its tokens (`tools/inspect_data.py verify` does).
    Of the test shards, which training does not read, the headers are checked: a wrong path shows at the start.

    Raises:
        DataError: a shard is missing, damaged, too short, or made with another tokenizer than the rest.
        ConfigError: the tokenizer has more tokens than the model's vocabulary; `eod_mask_loss` without a tokenizer.
    """
    config = _with_paths(config)
    train, valid = _open_shards(config, ("train", "valid"))
    for prefix in config.data.test_data_paths or ():
        read_header(prefix)
    tokenizer = _common_tokenizer(config)
    config = _with_vocabulary(config, tokenizer)
    return Corpus(
        config,
        _blend(config, "train", train),
        _blend(config, "valid", valid) if valid else None,
        tokenizer,
        _packing(config, tokenizer),
        tuple(prefix for prefix in _prefixes(config) if not _describes(Path(prefix).parent)),
    )


def validation_note(corpus: Corpus) -> str | None:
    """What to know of the validation data where a run asks for validation: that there is none, or that it is the test
    data as well; else None.
    """
    data, logging = corpus.config.data, corpus.config.logging
    if not logging.eval_iters:
        return None
    if corpus.valid is None:
        told = (
            f"split {data.split!r} leaves no document of {data.data_path}" if data.data_path else "there are no shards"
        )
        return (
            f"no validation loss will be reported: {told} to validate on; hold out more documents, or set eval_iters=0"
        )
    shared = [path for path in data.valid_data_paths or () if path in (data.test_data_paths or ())]
    if not shared:
        return None
    return f"validation reads test data ({', '.join(shared)}): choices made by it are choices made on the test data"


def open_split(config: Config, split: str) -> Blend | None:
    """The samples of train, valid or test alone, as `open_corpus` orders them; None where no data is named for it.

    Raises:
        DataError: a shard is missing, damaged or too short.
    """
    config = _with_paths(config)
    (shards,) = _open_shards(config, (split,))
    return _blend(config, split, shards) if shards else None


def _blend(config: Config, split: str, shards: Sequence[Shard]) -> Blend:
    weights = getattr(config.data, f"{split}_data_weights") or [1.0] * len(shards)
    return Blend(shards, weights, config.model.seq_length, config.seed)


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
    for split, part in zip(SPLITS, ("train", "test", "test"), strict=True):
        keys[f"{split}_data_paths"] = [str(folder / f"{name}_{part}") for name in BUILTIN_WEIGHTS]
        keys[f"{split}_data_weights"] = weights
    return config.override(keys)


def _open_shards(config: Config, splits: Sequence[str]) -> list[list[Shard]]:
    """The shards of each split, in the order of the configuration."""
    data = config.data
    if data.train_data_paths:
        return [[Shard(path) for path in getattr(data, f"{split}_data_paths") or ()] for split in splits]
    assert data.data_path is not None
    shares = split_shares(data.split)
    assert shares is not None, "a configuration holds a split that can be read"
    parts = dict(zip(SPLITS, split_shard(Shard(data.data_path), shares), strict=True))
    if parts["train"] is None:
        raise DataError(
            f"{data.data_path}: split {data.split!r} leaves no document to train on; change split or add documents"
        )
    return [[part] if (part := parts[split]) is not None else [] for split in splits]


def split_shard(shard: Shard, shares: Sequence[float]) -> list[Shard | None]:
    """Consecutive parts of a shard by shares of its documents, as GPT-NeoX's `split`; None for a part without
    documents.
    """
    edges = [round(edge / sum(shares) * shard.documents) for edge in accumulate(shares, initial=0.0)]
    return [shard.part(first, last) if last > first else None for first, last in pairwise(edges)]


def _prefixes(config: Config) -> list[str]:
    """All shards that the configuration names, each once."""
    groups = [getattr(config.data, f"{split}_data_paths") for split in SPLITS]
    groups.append([config.data.data_path] if config.data.data_path else None)
    return list(dict.fromkeys(prefix for group in groups for prefix in group or ()))


def _describes(folder: Path) -> bool:
    """Whether a tokenizer lies in the folder."""
    return (folder / DESCRIPTION).is_file()


def _common_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer that lies beside the shards; all of them and the named one, where one is named, must agree.

    A type that needs a file names a tokenizer together with it only: the default type does.
    """
    data = config.data
    folders = dict.fromkeys(Path(prefix).parent for prefix in _prefixes(config))
    found = {str(folder): load_saved_tokenizer(folder) for folder in folders if _describes(folder)}
    if data.vocab_file or not needs_files(data.tokenizer_type):
        named = load_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)
        found[data.vocab_file or f"tokenizer_type {data.tokenizer_type}"] = named
    if not all(agree(one, other) for one, other in pairwise(found.values())):
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


REPEATED = 4
"""Passes over a source up to which repeating it is worth about as much as new text, and beyond which ever less:
Muennighoff et al., "Scaling Data-Constrained Language Models" (2023).
"""
_HEADINGS = ("source", "weight", "share", "samples", "tokens", "epochs")


def mixture_table(shares: Sequence[SourceShare]) -> str:
    """A line for every source: weight asked for, share achieved, samples, tokens, passes over it."""
    return format_table(_HEADINGS, [_row(share) for share in shares])


def _row(share: SourceShare) -> tuple[str, ...]:
    return (
        share.source,
        f"{share.weight:.2%}",
        f"{share.fraction:.2%}",
        f"{share.samples:,}",
        f"{share.tokens:,}",
        f"{share.epochs:.3g}",
    )


def repeated_sources(shares: Sequence[SourceShare]) -> list[str]:
    """A line for every source that is read more than ``REPEATED`` times."""
    return [
        f"{share.source}: is read {share.epochs:.1f} times; beyond {REPEATED} passes text teaches ever less, "
        "so lower its weight, shorten the run, or add text"
        for share in shares
        if share.epochs > REPEATED
    ]


def source_names(sources: Sequence[str]) -> list[str]:
    """What sources are called in figures, by their prefixes: the shards' names where these differ, else whole prefixes."""
    short = [Path(source).name for source in sources]
    return short if len(set(short)) == len(short) else list(sources)


def mixture_figures(shares: Sequence[SourceShare]) -> dict[str, float]:
    """Share and passes of every source, as `share/NAME` and `epochs/NAME`."""
    figures: dict[str, float] = {}
    for name, share in zip(source_names([share.source for share in shares]), shares, strict=True):
        figures |= {f"share/{name}": share.fraction, f"epochs/{name}": share.epochs}
    return figures


Layout = tuple[int, int, int, int]
"""Global batch, micro batch, rank, world size."""
OpenLoader = Callable[[Corpus, Blend, Layout], Loader]

VALIDATION_LOSS = "validation_loss"


class Evaluator(Protocol):
    """What computes losses: the training engine."""

    def mean_loss(self, micro_batches: Sequence[Batch], /) -> float:
        """In nats per token, over all ranks; every rank must call it."""
        ...


def validate(corpus: Corpus, engine: Evaluator, layout: Layout, open_loader: OpenLoader) -> dict[str, float]:
    """Mean losses in nats per token of the first batches of the validation data: the same samples every time.

    `validation_loss` is that of `eval_iters` batches of the blend. Where there are several sources and
    `eval_per_source` is set, `validation_loss/NAME` is that of each by itself, over the batches that its weight in
    the blend gives it, at least one: all sources together cost about as much as the blend. Empty where nothing is to
    be validated. Every rank must call it.
    """
    keys = corpus.config.logging
    if corpus.valid is None or keys.eval_iters == 0:
        return {}
    losses = {VALIDATION_LOSS: _mean_loss(corpus, corpus.valid, engine, layout, open_loader, keys.eval_iters)}
    for name, (blend, batches) in _sources(corpus.valid, keys.eval_iters).items() if keys.eval_per_source else ():
        losses[f"{VALIDATION_LOSS}/{name}"] = _mean_loss(corpus, blend, engine, layout, open_loader, batches)
    return losses


def _mean_loss(
    corpus: Corpus, blend: Blend, engine: Evaluator, layout: Layout, open_loader: OpenLoader, batches: int
) -> float:
    with open_loader(corpus, blend, layout) as loader:
        losses = [engine.mean_loss(loader.micro_batches(index)) for index in range(batches)]
    return sum(losses) / len(losses)


def _sources(blend: Blend, batches: int) -> dict[str, tuple[Blend, int]]:
    """Every source as a blend of its own, by name, with its share of `batches`; empty for a single source."""
    if len(blend.shards) == 1:
        return {}
    shares = [weight / math.fsum(blend.weights) for weight in blend.weights]
    names = source_names([str(shard.prefix) for shard in blend.shards])
    return {
        name: (Blend([shard], [1.0], blend.seq_length, blend.seed), max(1, round(share * batches)))
        for name, shard, share in zip(names, blend.shards, shares, strict=True)
    }
