"""What is measured: one checkpoint in one of the ways in which its weights may be used."""

import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from megatron_coca.attention.build import BACKENDS
from megatron_coca.attention.inputs import BackendError
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.checkpoints import CheckpointError, OpenedCheckpoint, open_checkpoint
from megatron_coca.checkpoints.compare import EVALUATION_KEYS, TRAINED_CHOICES
from megatron_coca.config import Config, ConfigError, PositionConfig
from megatron_coca.config.position import ROTATED_METHODS
from megatron_coca.data import Tokenizer
from megatron_coca.evaluation.options import DTYPES, SubjectOptions, Variant, resolve_device, subject_options
from megatron_coca.evaluation.results import (
    CheckpointRecord,
    EnvironmentRecord,
    Missing,
    Result,
    Store,
    check_writable,
    out_of_memory,
)
from megatron_coca.model import GPT, keep_freed_memory

logger = logging.getLogger(__name__)

REFUSALS = (ConfigError, CheckpointError, BackendError)
"""What says that weights cannot be used in the way that is asked for."""


@dataclass(frozen=True)
class Header:
    """What every result file says of its subject."""

    label: str
    checkpoint: CheckpointRecord
    overrides: dict[str, Any]
    tokenizer: str | None
    environment: EnvironmentRecord

    def fields(self) -> dict[str, Any]:
        """For `SomeResult(**header.fields(), protocol=..., results=[], missing=[])`."""
        return vars(self)


@dataclass(frozen=True)
class Refused:
    """A use of the weights that has no meaning, or that nothing here can compute; `header` says what is known of it."""

    header: Header
    reason: str


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode on its device, with the tokenizer of its checkpoint and its configuration, what
    evaluation changes in it included.
    """

    header: Header
    model: GPT
    config: Config
    tokenizer: Tokenizer | None

    @property
    def label(self) -> str:
        """Its name in reports."""
        return self.header.label

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def training_length(self) -> int:
        """Of the weights, in tokens: the last length, where they were fine-tuned at another."""
        return self.header.checkpoint.seq_length

    @property
    def vocab_size(self) -> int:
        """Rows of the vocabulary that mean a token, those of the padding not counted."""
        return self.config.model.vocab_size or self.config.model.padded_vocab_size


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """A checkpoint opened once for all variants."""

    opened: OpenedCheckpoint
    options: SubjectOptions
    tokenizer: Tokenizer | None

    def subjects(self) -> Iterator[Subject | Refused]:
        """One after another, so that no two models are in memory at once."""
        device = resolve_device(self.options.device)
        if device == "cpu":
            keep_freed_memory()
        for variant in self.options.variants:
            yield self.subject(variant, device)

    def subject(self, variant: Variant, device: str) -> Subject | Refused:
        """Raises nothing of what a variant can do wrong; what the checkpoint itself has wrong it raises."""
        try:
            loaded = self.opened.load(variant.overrides, variant.files, device, DTYPES[self.options.dtype])
        except REFUSALS as error:
            said = {"variant": " ".join([*variant.files, *variant.overrides])}
            return Refused(
                self._header(variant, self.opened.trained, said, self._environment(None, device)), str(error)
            )
        changed = changed_keys(self.opened.trained, loaded.config)
        environment = self._environment(backend_name(loaded.model), device)
        header = self._header(variant, loaded.config, changed, environment)
        return Subject(header, loaded.model, loaded.config, self.tokenizer)

    def _header(
        self, variant: Variant, config: Config, overrides: dict[str, Any], environment: EnvironmentRecord
    ) -> Header:
        fingerprint = self.tokenizer.fingerprint if self.tokenizer is not None else None
        return Header(variant.label, self._checkpoint(config), overrides, fingerprint, environment)

    def _checkpoint(self, used: Config) -> CheckpointRecord:
        """`pos_emb` is that of `used`: overrides may correct what a Hugging Face folder does not say."""
        trained = self.opened.trained
        return CheckpointRecord(
            path=str(self.options.checkpoint),
            identity=self.opened.identity,
            step=self.opened.step,
            seq_length=trained.model.seq_length,
            pos_emb=used.position.pos_emb,
            trained_with=trained_with(trained),
        )

    def _environment(self, backend: str | None, device: str) -> EnvironmentRecord:
        place = torch.device(device)
        return EnvironmentRecord(
            dtype=self.options.dtype,
            backend=backend,
            device=torch.cuda.get_device_name(place) if place.type == "cuda" else str(place),
            torch=torch.__version__,
        )


def trained_with(trained: Config) -> dict[str, Any]:
    """What `CheckpointRecord.trained_with` says of a configuration."""
    values = trained.flat()
    choices = {key: values[key] for key in TRAINED_CHOICES if values[key] not in (None, "none")}
    base = trained.position.rotary_emb_base
    usual = PositionConfig.model_fields["rotary_emb_base"].default
    rotated = trained.position.pos_emb in ROTATED_METHODS
    return choices | ({"rotary_emb_base": base} if rotated and base != usual else {})


def open_source(options: SubjectOptions) -> EvaluatedCheckpoint:
    """A warning says what is missing of the tokenizer. Raises CheckpointError for a checkpoint that is not in order,
    DataError for its tokenizer.
    """
    opened = open_checkpoint(options.checkpoint)
    first = options.variants[0]  # what overrides say of a tokenizer they say for all variants
    found = opened.tokenizer(first.overrides, first.files)
    if found.note is not None:
        logger.warning("%s", found.note)
    return EvaluatedCheckpoint(opened, options, found.tokenizer)


def changed_keys(trained: Config, used: Config) -> dict[str, Any]:
    """The keys that evaluation changes, with their values: the same for the same use, however it was asked for."""
    before, after = trained.flat(), used.flat()
    return {key: after[key] for key in sorted(EVALUATION_KEYS) if before[key] != after[key]}


def backend_name(model: GPT) -> str:
    """The attention backend of a model by its name in the table."""
    backend = next(module.backend for module in model.modules() if isinstance(module, SelfAttention))
    return next(name for name, known in BACKENDS.items() if known is backend)


R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Task:
    """One subcommand of evaluate.py.

    Attributes:
        help: one line.
        add_arguments: declares the options.
        run: does the work and returns the exit status; raises one of `tasks.USER_ERRORS` for what the user can put
            right.
        of_checkpoint: whether it measures a checkpoint, in all its variants.
    """

    help: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    of_checkpoint: bool = True


class Measurement(Protocol[R]):
    """A task with its options read and its data at hand, to be done to one subject after another."""

    def empty(self, header: Header) -> R:
        """The result file of a subject before anything is measured."""

    def measure(self, subject: Subject, store: Store[R]) -> None:
        """Put every cell that `store` does not have yet; note what cannot be had."""

    def table(self, result: R) -> str:
        """For the console, Markdown."""


def run_subjects(args: Namespace, task: str, begin: Callable[[EvaluatedCheckpoint], Measurement[R]]) -> int:
    """Opens the checkpoint, lets `begin` gather the data, measures every variant, prints its table.

    Returns the exit status: 2 where anything that was asked for is missing, which is said on the error output.
    """
    options = subject_options(args)
    resolve_device(options.device)
    for variant in options.variants:
        if (output := options.output_of(task, variant.label)) is not None:
            check_writable(output)
    source = open_source(options)
    measurement = begin(source)
    complete = True
    for subject in source.subjects():
        header = subject.header
        store = Store(options.output_of(task, header.label), measurement.empty(header), options.overwrite)
        if isinstance(subject, Refused):
            store.miss(Missing(at="all", kind="refused", reason=subject.reason))
        else:
            measurement.measure(subject, store)
        complete &= tell(measurement, store)
    return 0 if complete else 2


def tell(measurement: Measurement[R], store: Store[R]) -> bool:
    """Print what there is, and on the error output what could not be measured now; whether all could be."""
    if store.result.results:
        print(measurement.table(store.result), flush=True)
    for missing in store.noted:
        print(f"evaluate.py: {store.result.label}: {missing.at}: {missing.kind}: {missing.reason}", file=sys.stderr)
    return not store.noted


@contextmanager
def noting_missing(store: Store[R], at: str, remedy: str) -> Iterator[None]:
    """Notes in `store` that the cell `at` cannot be measured, and goes on: the model does not have positions that far, or
    the memory did not suffice, for which `remedy` says what to do. Anything else is raised.
    """
    try:
        yield
    except PositionRangeError as error:
        store.miss(Missing(at=at, kind="refused", reason=str(error)))
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        device = store.result.environment.device
        store.miss(Missing(at=at, kind="out of memory", reason=f"the memory of {device} does not suffice; {remedy}"))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
