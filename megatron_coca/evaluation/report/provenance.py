"""Where numbers come from, in words."""

from collections.abc import Iterable, Sequence
from typing import Any

from megatron_coca.evaluation.report.document import Block, Entry, Line, Table
from megatron_coca.evaluation.report.grouping import Group
from megatron_coca.evaluation.report.reading import Loaded
from megatron_coca.evaluation.results import Result

SHORT = 12
"""Digits of a hash that are shown; report.json has them all."""

_LISTED = 4


def listed(texts: Iterable[str]) -> str:
    """Each once, the first few of many."""
    known = list(dict.fromkeys(texts))
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return ", ".join(known[:_LISTED]) + more


def checkpoint_name(result: Result) -> str:
    """Folder, step and the first digits of what names the weights."""
    checkpoint = result.checkpoint
    step = f", step {checkpoint.step}" if checkpoint.step is not None else ""
    return f"{checkpoint.path}{step} (weights {checkpoint.identity[:SHORT]})"


def environment_name(result: Result) -> str:
    """dtype, backend and device."""
    environment = result.environment
    return f"{environment.dtype}, {environment.backend or 'no backend'}, {environment.device}"


def origin(group: Group[Any]) -> str:
    """Checkpoints, data and machine behind a group, for captions."""
    headers = [series.header for series in group.series]
    checkpoints = listed(checkpoint_name(header) for header in headers)
    computed = listed(environment_name(header) for header in headers if header.environment.backend)
    return f"Checkpoints: {checkpoints}. {data_name(group.first)}Computed with {computed or 'nothing'}."


def data_name(result: Any) -> str:
    """What was read, with the first digits of its hash; nothing for a task without documents."""
    documents = getattr(result, "documents", None)
    if documents is not None:
        size = f"{documents.count} documents, {documents.tokens:,} tokens"
        return f"Data: {listed(documents.sources)} (sha256 {documents.sha256[:SHORT]}; {size}). "
    haystack = getattr(result.protocol, "haystack", None)
    return f"Data: {haystack.name} (sha256 {haystack.sha256[:SHORT]}). " if haystack is not None else ""


def heading(group: Group[Any]) -> str:
    """Of a block: empty where a task has one group alone."""
    return f"Results with {group.differs}" if group.differs else ""


HEADER = (
    *("label", "task", "checkpoint", "step", "weights", "trained at", "position method", "used with"),
    *("dtype", "backend", "device", "torch", "tokenizer"),
)


def models(loaded: Sequence[Loaded], papers: bool) -> list[Block]:
    """A row for each file: which weights, how they were used, and on what machine."""
    lines = [_line(each.result) for each in loaded]
    unique = {(line.name, line.entries): line for line in lines}
    table = Table("models", "Checkpoints, and how they were used", HEADER, tuple(unique.values()))
    return [Block(tables=(table,))] if lines else []


def _line(result: Result) -> Line:
    checkpoint, environment = result.checkpoint, result.environment
    used = "; ".join(f"{key}: {_value(value)}" for key, value in result.overrides.items()) or "as trained"
    texts = (
        result.task,
        checkpoint.path,
        "" if checkpoint.step is None else str(checkpoint.step),
        checkpoint.identity[:SHORT],
        str(checkpoint.seq_length),
        checkpoint.pos_emb,
        used,
        environment.dtype,
        environment.backend or "none",
        environment.device,
        environment.torch,
        (result.tokenizer or "none")[:SHORT],
    )
    return Line(result.label, tuple(Entry(text, wide=True) for text in texts))


def _value(value: Any) -> str:
    """A key's value; of a group of keys those that say something."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items() if each is not None)
    return str(value)
