"""The data of a run: shards, tokenizer and validation data."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints.tokenizer import fits
from megatron_coca.config import BatchSizes, Config, ConfigError, split_shares
from megatron_coca.config.data import SyntheticConfig, window_tokens
from megatron_coca.config.model import ASSUMED_VOCABULARY
from megatron_coca.data import (
    Blend,
    DataError,
    DrawnPositions,
    Loader,
    Packing,
    Samples,
    Shard,
    SourceShare,
    SyntheticSamples,
    TaskSettings,
    Tokenizer,
    ensure_builtin,
    load_saved_tokenizer,
    load_tokenizer,
)
from megatron_coca.data.builtin import VOCAB_SIZE, builtin_folder
from megatron_coca.data.identity import data_identity
from megatron_coca.data.inspection import shard_entry
from megatron_coca.data.mixture import sum_of_shares
from megatron_coca.data.preparation.preparation_plan import SPLITS
from megatron_coca.data.remote_shards import local_prefix
from megatron_coca.data.shards import read_header, shard_paths
from megatron_coca.data.tokenizers import needs_files
from megatron_coca.data.tokenizers.kinds import DESCRIPTION, agree
from megatron_coca.support.plain_text import masked
from megatron_coca.support.remote_files import is_url

logger = logging.getLogger(__name__)

BUILTIN_WEIGHTS = {"text": 0.75, "code": 0.25}
"""Token shares of the paper's data mixture."""
PACKING_KEYS = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")
"""Keys that change how the ends of documents in a sample are handled."""
CorpusLayout = tuple[int, int, int, int]
"""Global batch size, micro-batch size, data-parallel rank, number of data-parallel ranks."""


@dataclass(frozen=True)
class Corpus:
    """The data of a run.

    Attributes:
        config: the configuration with data paths and vocabulary size filled in.
        valid: the validation samples, or None if there are none.
        tokenizer: the tokenizer of the shards; None if the shards have no saved tokenizer and no key names one.
        unverified: prefixes of the shards without a saved tokenizer.
        left_out: one line for each validation shard that is not read, with the reason.
        start: first step and first sample number of this stage of the run; (0, 0) without stages.
        earlier: how much the run has read of each source before this stage.
    """

    config: Config
    train: Samples
    valid: Samples | None
    tokenizer: Tokenizer | None
    packing: Packing = Packing()
    unverified: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    start: tuple[int, int] = (0, 0)
    earlier: tuple[SourceShare, ...] = ()

    def mixture(self, position: int, batch: int) -> list[SourceShare]:
        """Return how much the run reads of each source before step `position`, with `batch` samples per step."""
        step, sample = self.start
        return sum_of_shares(self.earlier, self.train.mixture(sample + (position - step) * batch - self.train.first))

    @property
    def sources(self) -> list[str]:
        """Prefixes of the training shards or, for a synthetic task, of the shards with its filler text."""
        text = self.train.text if isinstance(self.train, SyntheticSamples) else self.train
        return [str(shard.prefix) for shard in text.shards] if text is not None else []

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Values that must not change when a run is resumed: the size, weight and content of each source, the
        tokenizer, the handling of documents, and the synthetic task.
        """
        identity = data_identity(self.train) | {"tokenizer": self.tokenizer.fingerprint if self.tokenizer else None}
        # Keys with their default values are left out.
        data = self.config.data
        changed = [name for name in PACKING_KEYS if getattr(data, name)]
        if data.pack_impl != "packed":
            changed.append(data.pack_impl + ("" if data.allow_chopped else ", not chopped"))
        identity |= {"documents": changed} if changed else {}
        if not isinstance(self.train, SyntheticSamples):
            return identity
        text = {"text": data_identity(self.train.text)} if self.train.text is not None else {}
        return identity | {"task": self.train.description} | text


def open_corpus(config: Config) -> Corpus:
    """Open the configured shards or, if there are none, the built-in corpus, which is prepared on first use.

    Opening a shard checks its file sizes and its index but not its tokens (`megatron-coca inspect verify` does). Test
    shards are not read in training, but their headers are checked, so that a wrong path is reported at the start.

    Raises:
        DataError: a shard is missing, damaged or too short, or the shards have different tokenizers.
        ConfigError: the tokenizer has more tokens than the model's vocabulary, apart from tokens that were added later
            and do not occur, or `eod_mask_loss` is set without a known tokenizer.
    """
    task, config = config.data.synthetic, with_task_vocabulary(config)
    if task is not None and not task.text:
        return Corpus(config, synthetic_samples(config, "train"), synthetic_samples(config, "valid"), None)
    config = _with_paths(config)
    train, valid = _open_shards(config, ("train", "valid"))
    for prefix in config.data.test_data_paths or ():
        read_header(_local(config, prefix))
    tokenizer, vocab_size = _common_tokenizer(config), config.model.vocab_size
    if task is not None and tokenizer is not None and tokenizer.vocab_size > task.filler_tokens:
        raise ConfigError(
            f"synthetic.filler_tokens: {task.filler_tokens}, but the filler's tokenizer has {tokenizer.vocab_size} "
            f"tokens; set synthetic.filler_tokens={tokenizer.vocab_size}"
        )
    if tokenizer is not None and vocab_size is None:
        config = config.override({"vocab_size": tokenizer.vocab_size})
    elif tokenizer is not None and vocab_size is not None and not fits(tokenizer, vocab_size):
        raise ConfigError(
            f"vocab_size: {vocab_size}, but the data's tokenizer has {tokenizer.vocab_size} tokens; "
            f"set vocab_size={tokenizer.vocab_size} or larger, or leave it out"
        )
    if tokenizer is not None and vocab_size is not None and tokenizer.vocab_size > vocab_size:
        _check_added_tokens([*train, *valid], tokenizer, vocab_size)
    data = config.data
    if data.eod_mask_loss and tokenizer is None:
        raise ConfigError(
            "eod_mask_loss: the end-of-document token is unknown, because no tokenizer is saved with the shards; set "
            "tokenizer_type and vocab_file"
        )
    held_out, left_out = _held_out(config, "valid", valid)
    masked = tokenizer.eod if data.eod_mask_loss and tokenizer is not None else None
    return Corpus(
        config,
        _samples(config, "train", _blend(config, "train", train)),
        _samples(config, "valid", held_out) if held_out is not None else None,
        tokenizer,
        Packing(data.reset_attention_mask, data.reset_position_ids, masked),
        tuple(
            prefix for prefix in _prefixes(config) if not (Path(_local(config, prefix)).parent / DESCRIPTION).is_file()
        ),
        left_out,
    )


def _check_added_tokens(shards: Sequence[Shard], tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise DataError if a manifest records that a shard contains a token beyond the vocabulary.

    Without this check, the run would end later, when it reads such a token.
    """
    for shard in shards:
        largest = shard_entry(shard.prefix).largest_id
        if isinstance(largest, int) and largest >= vocab_size:
            raise DataError(
                f"{shard.name}: contains token {tokenizer.piece(largest)!r} with id {largest}, but the model has only "
                f"{vocab_size} tokens; prepare texts without this token, or use a model with a row for it"
            )


def data_not_here(config: Config) -> list[str]:
    """Return a line for each part of the configured data that would have to be prepared, fetched or corrected.

    If the list is empty, `open_corpus` can open the data at once. This function only checks whether files exist.
    """
    task = config.data.synthetic
    labels = (label for split in SPLITS for label in getattr(config.data, f"{split}_label_data_paths") or () if label)
    named = list(dict.fromkeys((*_prefixes(config), *labels)))
    if task is not None and not task.text:
        return []
    if not named:
        folder = builtin_folder(Path(config.data.data_root))
        return [] if folder.exists() else [f"{folder}: the built-in corpus, which a run prepares"]
    remote = [f"{masked(prefix)}: on a store, from which a run copies the index" for prefix in named if is_url(prefix)]
    missing = [each for each in named if not is_url(each) and not shard_paths(Path(each))[1].is_file()]
    return [*remote, *(f"{prefix}: no such shard; prepare it before the run" for prefix in missing)]


def task_settings(task: SyntheticConfig) -> TaskSettings:
    """Return the settings of the configured synthetic task."""
    return TaskSettings(**task.model_dump())


def synthetic_samples(config: Config, split: str, text: Blend | None = None) -> SyntheticSamples:
    """Return the samples of the configured synthetic task; `text` is its filler text, if it has any."""
    assert config.data.synthetic is not None
    return SyntheticSamples(task_settings(config.data.synthetic), config.model.seq_length, config.seed, split, text)


def with_task_vocabulary(config: Config) -> Config:
    """If `config` has a synthetic task and sets no vocabulary size, return a copy with the size of the task.

    Raises:
        ConfigError: the size is too small for the task.
    """
    if config.data.synthetic is None:
        return config
    task, vocab_size = task_settings(config.data.synthetic), config.model.vocab_size
    if vocab_size is not None and vocab_size < task.vocab_size:
        raise ConfigError(
            f"vocab_size: {vocab_size}, but the synthetic task has {task.vocab_size} token ids; leave vocab_size out"
        )
    return config if vocab_size is not None else config.override({"vocab_size": task.vocab_size})


def with_vocabulary(config: Config) -> tuple[Config, str | None]:
    """Return the configuration with the vocabulary size that training would set, and a note on the source of this size.

    Nothing is prepared or downloaded. If the data is not here, the size comes from the configured tokenizer. If the
    tokenizer's files are not here either, the size is `ASSUMED_VOCABULARY`. There is no note if the configuration or
    its synthetic task sets the size.

    Raises:
        ConfigError: the size is too small for the synthetic task.
        DataError: a tokenizer is damaged, or the tokenizers differ.
    """
    config = with_task_vocabulary(config)
    if config.model.vocab_size is not None:
        return config, None
    data, absent, named = config.data, data_not_here(config), _prefixes(config)
    if not absent:
        tokenizer = _common_tokenizer(_with_paths(config))
    else:
        tokenizer = _configured_tokenizer(config) if data.vocab_file and os.path.exists(data.vocab_file) else None
    builtin = "that of the built-in corpus, because no data path is set"
    if tokenizer is not None:
        size, source = tokenizer.vocab_size, "that of the tokenizer" if named else builtin
    elif not named:
        size, source = VOCAB_SIZE, builtin
    else:
        size, source = ASSUMED_VOCABULARY, f"assumed, because {data.vocab_file or masked(named[0])} is not here"
    remedy = "" if named and tokenizer is not None else "; set vocab_size to change it"
    return config.override({"vocab_size": size}), f"vocab_size: not set; it is {size:,}, {source}{remedy}"


def _samples(config: Config, split: str, blend: Blend) -> Samples:
    return blend if config.data.synthetic is None else synthetic_samples(config, split, blend)


def open_split(config: Config, split: str) -> Blend | None:
    """Open the samples of a split (train, valid or test) in the same order as `open_corpus`; None if the split has no
    data.

    Raises:
        DataError: a shard is missing, damaged or too short.
    """
    config = _with_paths(config)
    (shards,) = _open_shards(config, (split,))
    if split == "train":
        return _blend(config, split, shards)
    blend, left_out = _held_out(config, split, shards)
    for line in left_out:
        logger.warning(line)
    return blend


def open_loader(
    corpus: Corpus, blend: Samples | None = None, layout: CorpusLayout | None = None, length: int | None = None
) -> Loader:
    """Open a loader for samples of the corpus, by default for the training samples in a single process. With `length`,
    the loader returns only the last `length` inputs of each sample.

    Training samples get the configured `training_positions`. The loader raises an error for a token id beyond the
    vocabulary even if the padded embedding has a row for it, because no tokenizer with the configured vocabulary
    produces such an id.
    """
    data, vocab_size = corpus.config.data, corpus.config.model.vocab_size
    blend = corpus.train if blend is None else blend
    if layout is None:
        sizes = corpus.config.batch.resolve(1)
        layout = sizes.total, sizes.micro, 0, 1
    given, drawn = corpus.config.training_positions, None
    start = corpus.start if blend is corpus.train else (0, 0)
    if given is not None and blend is corpus.train:
        largest = window_tokens(given.max, corpus.config.model.seq_length)
        assert largest is not None, "already checked by the configuration"
        drawn = DrawnPositions(given.type, largest, corpus.config.seed)
    packing, workers = corpus.packing, data.num_workers
    return Loader(blend, *layout, vocab_size, packing, workers, length, drawn, start)


def _with_paths(config: Config) -> Config:
    """Return the configuration, with the paths of the built-in corpus if it has no data path."""
    if config.data.data_path or config.data.train_data_paths:
        return config
    folder = ensure_builtin(Path(config.data.data_root)).parent
    keys: dict[str, Any] = {}
    for split, suffix in zip(SPLITS, ("train", "test", "test"), strict=True):
        keys[f"{split}_data_paths"] = [str(folder / f"{name}_{suffix}") for name in BUILTIN_WEIGHTS]
        keys[f"{split}_data_weights"] = list(BUILTIN_WEIGHTS.values())
    return config.override(keys)


def _open_shards(config: Config, splits: Sequence[str]) -> list[list[Shard]]:
    """Open the shards of each split, in the order of the configuration."""
    data = config.data
    if data.train_data_paths:
        return [
            [
                Shard(_local(config, path), labels and _local(config, labels))
                for path, labels in zip_longest(getattr(data, f"{split}_data_paths") or (), given)
            ]
            for split in splits
            for given in [getattr(data, f"{split}_label_data_paths") or ()]
        ]
    assert data.data_path is not None
    shares = split_shares(data.split)
    assert shares is not None, "already checked by the configuration"
    shards = dict(zip(SPLITS, split_shard(Shard(_local(config, data.data_path)), shares), strict=True))
    if shards["train"] is None:
        raise DataError(
            f"{data.data_path}: split {data.split!r} leaves no training document; change split or add documents"
        )
    return [[shard] if (shard := shards[split]) is not None else [] for split in splits]


def split_shard(shard: Shard, shares: Sequence[float]) -> list[Shard | None]:
    """Divide a shard's documents into consecutive parts by `shares`, like GPT-NeoX's `split`; None for an empty part.

    The number of documents of each part is rounded; the first part absorbs the rounding difference.
    """
    edges = list(accumulate((round(share / sum(shares) * shard.documents) for share in shares), initial=0))
    edges = [0, *(max(0, edge + shard.documents - edges[-1]) for edge in edges[1:])]
    return [shard.part(first, last) if last > first else None for first, last in pairwise(edges)]


def _held_out(config: Config, split: str, shards: Sequence[Shard]) -> tuple[Blend | None, tuple[str, ...]]:
    """Return the samples of held-out shards, and the reason for each shard that is left out. A shard that is too short
    must not stop the run. If no shard has a sample, the samples are None.
    """
    weights, kept, reasons = _weights(config, split, shards), [], []
    for shard, weight in zip(shards, weights, strict=True):
        try:
            _mixed(config, [shard], [1.0])
            kept.append((shard, weight))
        except DataError as error:
            reasons.append(f"validation leaves out {error}" if split == "valid" else f"{split}: {error}")
    return _mixed(config, *map(list, zip(*kept, strict=True))) if kept else None, tuple(reasons)


def _blend(config: Config, split: str, shards: Sequence[Shard]) -> Blend:
    return _mixed(config, shards, _weights(config, split, shards))


def _weights(config: Config, split: str, shards: Sequence[Shard]) -> list[float]:
    weights = getattr(config.data, f"{split}_data_weights") or [1.0] * len(shards)
    if config.data.weight_by_num_documents:
        alpha = config.data.weighted_sampler_alpha
        weights = document_weights([shard.documents for shard in shards], 1.0 if alpha is None else alpha)
    return list(weights)


def _mixed(config: Config, shards: Sequence[Shard], weights: Sequence[float]) -> Blend:
    keys = config.data
    return Blend(shards, weights, config.model.seq_length, config.seed, keys.pack_impl, keys.allow_chopped)


def document_weights(documents: Sequence[int], alpha: float) -> list[float]:
    """Return GPT-NeoX's shard weights by document count: p^alpha / sum(p^alpha) * (1 - p), normalized to sum 1, where p
    is a shard's share of all documents. A single shard has the weight 1.
    """
    if len(documents) == 1:
        return [1.0]
    shares = [number / sum(documents) for number in documents]
    raised = [share**alpha for share in shares]
    weights = [power / sum(raised) * (1 - share) for power, share in zip(raised, shares, strict=True)]
    return [weight / sum(weights) for weight in weights]


def with_train_iters(config: Config, sizes: BatchSizes) -> Config:
    """If `train_epochs` is set, return the configuration with the corresponding `train_iters`.

    As in GPT-NeoX, samples at the end of the data that do not fill a micro-batch are not read. Every shard is weighted
    by its number of samples, so that all shards are read equally often.
    """
    epochs = config.schedule.train_epochs
    if epochs is None:
        return config
    (shards,) = _open_shards(config, ("train",))
    samples = _blend(config, "train", shards).epoch_samples
    iters = sum(samples) * sizes.accumulation // sizes.total * epochs // sizes.accumulation
    if iters == 0:
        raise DataError(
            f"train_epochs: the data has {sum(samples)} samples, but a step reads {sizes.total}; lower "
            "train_batch_size, or add documents"
        )
    logger.info("train_epochs %d: %d samples in %d steps", epochs, sum(samples), iters)
    weights = [float(number) for number in samples] if config.data.train_data_paths else None
    return config.override({"train_iters": iters, "train_epochs": None, "train_data_weights": weights})


def _local(config: Config, prefix: str) -> str:
    return local_prefix(prefix, config.data.data_root)


def _prefixes(config: Config) -> list[str]:
    """Return the prefixes of all configured shards, without duplicates."""
    groups = [getattr(config.data, f"{split}_data_paths") for split in SPLITS]
    groups.append([config.data.data_path] if config.data.data_path else None)
    return list(dict.fromkeys(prefix for group in groups for prefix in group or ()))


def _common_tokenizer(config: Config) -> Tokenizer | None:
    """Return the tokenizer that is saved with the shards. All saved tokenizers and the configured one (if any) must be
    the same.

    A configured tokenizer type that needs a file, such as the default type, is ignored unless the file is given.
    """
    data = config.data
    folders = dict.fromkeys(Path(_local(config, prefix)).parent for prefix in _prefixes(config))
    tokenizers = {str(folder): load_saved_tokenizer(folder) for folder in folders if (folder / DESCRIPTION).is_file()}
    if (named := _configured_tokenizer(config)) is not None:
        tokenizers[data.vocab_file or f"tokenizer_type {data.tokenizer_type}"] = named
    if not all(agree(one, other) for one, other in pairwise(tokenizers.values())):
        raise DataError(
            f"{', '.join(tokenizers)}: the tokenizers differ; prepare all shards of a run with the same tokenizer"
        )
    return next(iter(tokenizers.values()), None)


def _configured_tokenizer(config: Config) -> Tokenizer | None:
    """Return the tokenizer that the configuration names, or None if it names no file and its type needs one."""
    data = config.data
    if not data.vocab_file and needs_files(data.tokenizer_type):
        return None
    return load_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)


def validation_note(corpus: Corpus) -> str | None:
    """Return a note if validation is enabled but has no data, or uses test data."""
    data = corpus.config.data
    if not corpus.config.logging.eval_iters:
        return None
    if corpus.valid is None:
        if corpus.left_out:
            cause = "no validation shard is long enough for a sample"
        elif data.data_path:
            cause = f"split {data.split!r} leaves no validation document in {data.data_path}"
        else:
            cause = "there are no validation shards"
        return f"no validation loss will be reported: {cause}; hold out more documents, or set eval_iters=0"
    shared = [path for path in data.valid_data_paths or () if path in (data.test_data_paths or ())]
    if not shared:
        return None
    return (
        f"valid_data_paths: {', '.join(shared)}: also in test_data_paths, so choices based on the validation loss are "
        "choices on test data; use different data for validation"
    )
