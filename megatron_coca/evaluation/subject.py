"""The evaluated checkpoint and its variants. Each variant has its own config overrides and result file."""

import json
import logging
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_coca.attention.backends.sdpa import cuda_kernel
from megatron_coca.attention.build import BACKENDS
from megatron_coca.attention.inputs import BackendError
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.checkpoints import CheckpointError, open_checkpoint
from megatron_coca.checkpoints.compare import EVALUATION_KEYS, TRAINED_CHOICES
from megatron_coca.checkpoints.identity import network_digest
from megatron_coca.checkpoints.weights import DTYPES
from megatron_coca.config import KEYS, Config, ConfigError, PositionConfig
from megatron_coca.config.position import ORIGINAL
from megatron_coca.config.schema import not_at_default
from megatron_coca.config.source import given_values
from megatron_coca.data import Tokenizer
from megatron_coca.evaluation import results
from megatron_coca.evaluation.chosen_dtype import chosen_dtype
from megatron_coca.evaluation.multiples import converted, has_multiples, is_multiple
from megatron_coca.evaluation.options import (
    AUTO,
    SubjectOptions,
    Variant,
    read_variants,
    resolve_device,
    subject_options,
)
from megatron_coca.evaluation.results import CheckpointRecord, EvaluationError, Missing, ResultType, Show, Store
from megatron_coca.model import GPT, empty_model
from megatron_coca.model.build import use_ring_backends
from megatron_coca.support.console import write
from megatron_coca.support.host import keep_freed_memory
from megatron_coca.support.plain_text import masked, plain

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Header:
    label: str
    checkpoint: CheckpointRecord
    overrides: dict[str, Any]
    tokenizer: str | None
    environment: results.EnvironmentRecord


@dataclass(frozen=True)
class Unusable:
    """A variant that cannot be evaluated: its overrides do not fit the weights, or no backend supports them."""

    header: Header
    reason: str


@dataclass(frozen=True)
class Subject:
    """A variant's model, in evaluation mode and on its device, with the tokenizer and the config after overrides."""

    header: Header
    model: GPT
    config: Config
    tokenizer: Tokenizer | None

    @property
    def label(self) -> str:
        return self.header.label

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def training_length(self) -> int:
        """Training length in tokens; for a fine-tuned model, the length used in fine-tuning."""
        return self.header.checkpoint.seq_length

    @property
    def vocab_size(self) -> int:
        """Number of token ids, without the padding rows of the vocabulary."""
        return self.config.model.vocab_size or self.config.model.padded_vocab_size


def with_choices(args: Namespace) -> Namespace:
    """Return the options of a task, with multiples of the training length converted to tokens and the dtype chosen.

    `--dtype auto` becomes the dtype of existing result files, so that these are resumed. Without such files, it becomes
    the dtype that `chosen_dtype` chooses. Raises EvaluationError, CheckpointError or ConfigError.
    """
    automatic, multiples = args.dtype == AUTO, has_multiples(args)
    if not automatic and not multiples:
        return args
    variants = read_variants(Namespace(**vars(args) | {"overrides": []}))
    keys = [change for variant in variants for change in variant.overrides if change.startswith("imports=")]
    named = [key for key in args.overrides if not is_multiple(key.partition("=")[2])]
    trained = open_checkpoint(args.checkpoint, verify=False, overrides=[*named, *keys]).trained
    if multiples:
        args = converted(args, trained.model.seq_length)
    if automatic:
        options = subject_options(args)
        outputs = [options.output_of(args.task, variant.label) for variant in options.variants]
        args = Namespace(**vars(args) | {"dtype": dtype_of(trained, args.dtype, args.device, outputs)})
    return args


def dtype_of(trained: Config, dtype: str, device: str, outputs: Sequence[Path | None]) -> str:
    """Return the dtype to use for `--dtype`.

    For `AUTO`, this is the dtype in the first result file of `outputs` that exists. If none exists, it is the dtype
    that `chosen_dtype` chooses. The choice is printed.
    """
    if dtype != AUTO:
        return dtype
    recorded = next(filter(None, (results.recorded(path, "environment", "dtype") for path in outputs)), None)
    chosen, reason = (recorded, "") if recorded else chosen_dtype(trained.model, resolve_device(device))
    write(reason or f"--dtype auto: {chosen}, as in the results so far")
    return chosen


class Evaluation:
    """One run of a task on all variants of a checkpoint. A missing tokenizer causes only a warning.

    The constructor checks everything that does not need a loaded model, and raises EvaluationError, CheckpointError or
    DataError. `status` is the exit status: 2 if a requested result is missing. `ring_ranks` is the number of processes
    that will divide every input by tokens.
    """

    def __init__(self, options: SubjectOptions, task: str, show: Show = lambda *results: None) -> None:
        self.task, self.options, self.status, self._show = task, options, 0, show
        self.ring_ranks = 1
        resolve_device(options.device)
        for variant in options.variants:
            if (output := options.output_of(task, variant.label)) is not None:
                results.check_writable(output)
        first = options.variants[0]  # all variants have the same tokenizer overrides
        named = (each for each in options.variants if "imports" in given_values(each.overrides, each.files))
        methods = next(named, first)
        self.opened = open_checkpoint(options.checkpoint, overrides=methods.overrides, files=methods.files)
        # The identity is read now, because the folder may change before the weights are loaded.
        self._identity = self.opened.identity
        found = self.opened.tokenizer(first.overrides, first.files)
        if found.note is not None:
            logger.warning("%s", found.note)
        self.tokenizer = found.tokenizer

    def needed_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises EvaluationError if the checkpoint has no tokenizer."""
        if self.tokenizer is None:
            raise EvaluationError(
                f"{self.options.checkpoint}: has no tokenizer, which this task needs for its prompts; put the model's "
                "tokenizer.json into the folder"
            )
        return self.tokenizer

    @property
    def untrained(self) -> bool:
        """True for a Hugging Face folder, and for a checkpoint that was imported from one and not trained since.

        Such a model expects the special tokens that its own library adds around a text.
        """
        return self.opened.settings is not None or (bool(self.opened.imported) and not self.opened.step)

    def start_token(self, symbol: str | None) -> int | None:
        """Return the result of `chosen_start`, and call `warn_of_start`. Raises the errors of `chosen_start`."""
        start = self.chosen_start(symbol)
        self.warn_of_start(symbol)
        return start

    def chosen_start(self, symbol: str | None) -> int | None:
        """Return the token id of `--start-token`, or None if the option is not set.

        Raises EvaluationError if the checkpoint has no tokenizer, DataError if the vocabulary has no such symbol.
        """
        if symbol is None:
            return None
        if self.tokenizer is None:
            raise EvaluationError(f"--start-token {symbol}: the checkpoint has no tokenizer; remove the option")
        return self.tokenizer.token(symbol)

    def warn_of_start(self, symbol: str | None) -> None:
        """Warn if `--start-token` is not set although the model's texts usually begin with a special token."""
        warning = None if symbol is not None or self.tokenizer is None else self.tokenizer.start_warning()
        if warning is not None:
            logger.warning("%s", warning)

    def subjects(self) -> Iterator[Subject | Unusable]:
        """Load the variants one at a time; yield `Unusable` for a variant that cannot be loaded."""
        for variant in self.options.variants:
            yield self.subject(variant)

    def subject(self, variant: Variant, weights: GPT | None = None) -> Subject | Unusable:
        """Load a variant. If `weights` is a loaded variant's model, both models share their weights."""
        device = resolve_device(self.options.device)
        if device == "cpu":
            keep_freed_memory()
        trained, dtype = self.opened.trained, DTYPES[self.options.dtype]
        try:
            if weights is None:
                loaded = self.opened.load(variant.overrides, variant.files, device, dtype, show=True)
                model, config = loaded.model, loaded.config
            else:
                config = self.opened.configure(variant.overrides, variant.files)
                model = empty_model(config, device, training=False, dtype=dtype).eval()
                model.load_state_dict(weights.state_dict(), assign=True)
            if self.ring_ranks > 1:
                use_ring_backends(model, config, device)
        except (ConfigError, CheckpointError, BackendError) as error:
            overrides = {"variant": masked(" ".join([*variant.files, *variant.overrides]))}
            return Unusable(self._header(variant.label, trained, overrides, None, device), str(error))
        changed = changed_keys(trained, config)
        if self.opened.changed_imports:  # `trained` already includes the changed imports
            changed["imports"] = config.position.imports
        used = config.position
        if trained.position.rope_scaling and used.rope_scaling and trained.position.extension != used.extension:
            changed["rope_scaling"] |= {ORIGINAL: used.original_length(config.model.seq_length)}
        backend = backend_record(model, config, device)
        backend += f", {self.ring_ranks} processes" if self.ring_ranks > 1 else ""
        header = self._header(variant.label, config, changed, backend, device)
        return Subject(header, model, config, self.tokenizer)

    def _header(
        self, label: str, config: Config, overrides: dict[str, Any], backend: str | None, device: str
    ) -> Header:
        trained = self.opened.trained
        checkpoint = CheckpointRecord(
            path=masked(str(self.options.checkpoint)),
            identity=self._identity,
            step=self.opened.step,
            seq_length=trained.model.seq_length,
            pos_emb=config.position.pos_emb,  # the variant's value: a Hugging Face folder may not record the method
            trained_with=trained_with(trained),
            seed=trained.seed if self.opened.step is not None else None,  # not recorded in a Hugging Face folder
            network=network_digest(trained),
            recipe=recipe_of(trained) if self.opened.step is not None else None,
        )
        environment = environment_record(self.options.dtype, backend, device)
        fingerprint = self.tokenizer.fingerprint if self.tokenizer is not None else None
        return Header(label, checkpoint, overrides, fingerprint, environment)

    def store(self, subject: Subject | Unusable, kind: type[ResultType], **fields: Any) -> Store[ResultType]:
        """Return the store of a variant. If the variant is unusable, the store records all entries as missing."""
        empty = kind(**vars(subject.header), **fields, results=[], missing=[])
        store = Store(self.options.output_of(self.task, subject.header.label), empty, self.options.overwrite)
        if isinstance(subject, Unusable):
            store.miss(Missing(at="all", kind="refused", reason=subject.reason))
        return store

    def variants(self, kind: type[ResultType], **fields: Any) -> Iterator[tuple[Subject, Store[ResultType]]]:
        """Yield each usable variant with its result store, and print its missing entries to stderr. At the end, show
        the results of all variants together, even if the evaluation is interrupted.

        `kind` is the type of the result files; `fields` are the field values that all of these files share.
        """
        stores: list[Store[ResultType]] = []
        try:
            for subject in self.subjects():
                store = self.store(subject, kind, **fields)
                stores.append(store)
                if isinstance(subject, Subject):
                    yield subject, store
                for missing in store.noted:
                    self.status = 2
                    print_missing(subject.header.label, missing)
        finally:
            if measured := [store.result for store in stores if store.result.results]:
                self._show(*measured)


def print_missing(label: str, missing: Missing) -> None:
    """Print one line to stderr that says why an entry has no result."""
    line = f"megatron-coca evaluate: {label}: {missing.at}: {missing.shown}: {missing.reason}"
    print(plain(line), file=sys.stderr)


def environment_record(dtype: str, backend: str | None, device: str) -> results.EnvironmentRecord:
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device
    return results.EnvironmentRecord(dtype=dtype, backend=backend, device=name, torch=torch.__version__)


def recipe_of(trained: Config) -> dict[str, Any]:
    """Return the keys that, together with the seed, determine what a training produces. Keys at their defaults, paths,
    and the keys of the network are left out.
    """
    flat = trained.flat()
    keys = [key for key, place in KEYS.items() if place.group in RECIPE_GROUPS or key in RECIPE_KEYS]
    recipe = not_at_default(keys, flat)
    if stages := recipe.get("stages"):
        recipe["stages"] = [{key: value for key, value in stage.items() if _in_stage(key)} for stage in stages]
    found: dict[str, Any] = json.loads(json.dumps(recipe))  # the form in result files: JSON has no tuples
    return found


def _in_stage(key: str) -> bool:
    """Return whether a stage's key belongs to the recipe. This includes keys that only stages have, like `until`."""
    return key not in KEYS or key in RECIPE_KEYS or KEYS[key].group in (*RECIPE_GROUPS, "model", "position")


RECIPE_GROUPS = ("optimizer", "schedule")
RECIPE_KEYS = frozenset(
    {
        "train_batch_size",
        "init_method",
        "init_method_std",
        "output_layer_init_method",
        "training_positions",
        "train_data_weights",
        "weight_by_num_documents",
        "weighted_sampler_alpha",
        "pack_impl",
        "allow_chopped",
        "reset_attention_mask",
        "reset_position_ids",
        "eod_mask_loss",
        "synthetic",
    }
)


def trained_with(trained: Config) -> dict[str, Any]:
    values = trained.flat()
    choices = {key: values[key] for key in TRAINED_CHOICES if values[key] not in (None, "none")}
    if trained.position.layer_types:
        choices |= {key: values[key] for key in ("attention_config", "layer_types")}
    for key in ("sliding_window_width", "attention_chunk_size", "sink_logits", "forgetting_gate"):
        if values[key]:
            choices[key] = values[key]
    base = trained.position.rotary_emb_base
    if trained.position.embedding.rotary and base != PositionConfig.model_fields["rotary_emb_base"].default:
        choices["rotary_emb_base"] = base
    return choices


def changed_keys(trained: Config, used: Config) -> dict[str, Any]:
    """Return the config keys that evaluation changes, with their values in evaluation.

    The result does not depend on how the overrides were written.
    """
    before, after = trained.flat(), used.flat()
    return {key: after[key] for key in sorted(EVALUATION_KEYS) if before[key] != after[key]}


def backend_record(model: GPT, config: Config, device: str, trains: bool = False, decodes: bool = False) -> str:
    """Return the attention backend as result files record it. For `sdpa` on a GPU, also name PyTorch's kernel.

    The kernel is the one that PyTorch chooses for a forward pass without gradients. With `trains`, it is the kernel of
    a training pass; with `decodes`, that of a decoding step with a cache.
    """
    name = backend_name(model)
    if name != "sdpa" or torch.device(device).type != "cuda":
        return name
    shape, dtype = config.model, next(model.parameters()).dtype
    sizes = (shape.num_attention_heads, shape.num_kv_heads, shape.seq_length, shape.head_dim)
    return f"{name} ({cuda_kernel(*sizes, dtype, trains, decodes)})"


def backend_name(model: GPT) -> str:
    backend = next(module.backend for module in model.modules() if isinstance(module, SelfAttention))
    return next(name for name, known in BACKENDS.items() if known is backend)


@contextmanager
def noting_missing(store: Store[Any], at: str, remedy: str) -> Iterator[None]:
    """Record the entry `at` as missing in `store` if the model does not support its positions or memory runs out.

    `remedy` is the advice shown if memory runs out. Other errors are raised.
    """
    try:
        yield
    except PositionRangeError as error:
        store.miss(Missing(at=at, kind="refused", reason=str(error)))
    except (RuntimeError, MemoryError) as error:
        if not results.out_of_memory(error):
            raise
        device = store.result.environment.device
        store.miss(Missing(at=at, kind="out of memory", reason=f"{device} ran out of memory; {remedy}"))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
