"""Results of `megatron-coca stretch` made by hand: nine methods at three lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_coca.config import Config, load_config
from megatron_coca.evaluation.chat_settings import ChatRecord
from megatron_coca.evaluation.results import (
    CheckpointRecord,
    Cost,
    DocumentsRecord,
    EnvironmentRecord,
    Meter,
    Missing,
)
from megatron_coca.evaluation.stretch.choices import chosen_methods
from megatron_coca.evaluation.stretch.plans import Plan, read_plan
from megatron_coca.evaluation.stretch.records import StretchResult
from megatron_coca.evaluation.tasks.margin.measure import PROTOCOL
from megatron_coca.evaluation.tasks.margin.task import (
    CaseMargin,
    MarginEntry,
    MarginProtocol,
    MarginResult,
    facts_at,
    windows_at,
)

TRAINED, SCORED = 8192, 1024
LENGTHS = (8192, 16384, 32768)
SHAPE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": TRAINED, "vocab_size": 512}
SHAPE |= {"pos_emb": "rotary"}
PLAN: Plan = read_plan(Path(__file__).parents[3] / "studies/real_model/plan.yml")
LOSSES = {"plain": (3.0, 6.0, 8.0), "yarn:2": (3.02, 3.04, 5.0), "rerope+log_n": (3.01, 3.02, 3.03)}
"""Nats per token of some methods by length; the others are between them."""
MARGINS = {"plain": (9.0, -8.0, -9.0), "yarn:2": (8.0, 6.0, -5.0), "rerope+log_n": (8.5, 2.0, 1.0)}


def config_of(name: str) -> Config:
    (_, *found) = chosen_methods([name], PLAN.to, TRAINED)
    return load_config(SHAPE, found[0].overrides if found else ())


def empty_result(name: str, documents: int, seed: int = 0, error: str = "") -> MarginResult:
    """A result without entries. `error` says why the model does not support the method."""
    checkpoint = CheckpointRecord(path="models/smollm2", identity="1", step=None, seq_length=TRAINED, pos_emb="rotary")
    return MarginResult(
        label=name,
        checkpoint=checkpoint,
        overrides={},
        tokenizer="1",
        environment=EnvironmentRecord(dtype="bfloat16", backend="sdpa", device="cpu", torch="2.13.0"),
        protocol=MarginProtocol(text=PROTOCOL, scored=SCORED, seed=seed, chat=ChatRecord(template_sha256="1")),
        documents=DocumentsRecord(
            sha256="1", count=documents, tokens=documents, max_length=1, repeated=None, sources=[]
        ),
        results=[],
        missing=[Missing(at="all", kind="refused", reason=error)] if error else [],
    )


def entry_of(
    length: int, nats: Sequence[float] = (), cases: Sequence[CaseMargin] = (), documents: int = 4
) -> MarginEntry:
    """`nats` has the nats per token of each window."""
    nlls = [SCORED * each for each in nats]
    return MarginEntry(length=length, documents=documents, scored=SCORED, cases=list(cases), nlls=nlls)


Entries = Mapping[tuple[str, int], MarginEntry]
"""Entries by method and length."""


def entries_of(result: StretchResult) -> dict[tuple[str, int], MarginEntry]:
    return {(name, entry.length): entry for name, own in result.results.items() for entry in own.results}


def with_entries(result: StretchResult, entries: Entries) -> StretchResult:
    """The result with these entries only."""
    own = {name: [entry for key, entry in entries.items() if key[0] == name] for name in result.results}
    given = {name: each.model_copy(update={"results": own[name]}) for name, each in result.results.items()}
    return replace(result, results=given)


def changed(result: StretchResult, method: str, length: int, **changes: Any) -> StretchResult:
    """The result with other values of one entry."""
    entries = entries_of(result)
    entries[method, length] = entries[method, length].model_copy(update=changes)
    return with_entries(result, entries)


def timed(seconds: Mapping[int, float], names: Sequence[str]) -> dict[str, dict[str, Cost]]:
    """Costs of methods with these seconds for the facts, and as many for the windows, by length."""
    at = {name: each for length, each in seconds.items() for name in (facts_at(length), windows_at(length))}
    return {name: {key: Cost.of(key, Meter(each), 1) for key, each in at.items()} for name in names}


def small_result(
    facts: Mapping[str, Mapping[int, Sequence[tuple[bool, float]]]],
    losses: Mapping[tuple[str, int], Sequence[float]] | None = None,
) -> StretchResult:
    """A result of `plain` and the named methods at 1x and 2x.

    `facts` has (found, margin) by method and length; at 1x, each method finds four facts. `losses` has nats per token
    of each window; by default, plain fails at 2x, and all else is one window of 3.0 (plain at 1x) or 3.01.
    """
    given = {("plain", TRAINED): [3.0], ("plain", 2 * TRAINED): [6.0]} | dict(losses or {})
    names = list(dict.fromkeys(["plain", *facts, *(name for name, _ in given)]))
    entries = {}
    for name in names:
        for length in (TRAINED, 2 * TRAINED):
            own = facts.get(name, {}).get(length, [(True, 9.0)] * 4 if length == TRAINED else [])
            tasks = ("passkey", "needle")
            cases = [
                CaseMargin(task=tasks[number % 2], number=number, tokens=length, depth=0.5, margin=margin, found=found)
                for number, (found, margin) in enumerate(own)
            ]
            entries[name, length] = entry_of(length, given.get((name, length), [3.01]), cases)
    empty = StretchResult({name: empty_result(name, 4) for name in names}, timed({TRAINED: 8, 2 * TRAINED: 8}, names))
    return with_entries(empty, entries)


def stretch_result() -> StretchResult:
    """The whole plan of studies/real_model/plan.yml, and a method that the model does not support."""
    entries = {}
    for index, name in enumerate(PLAN.methods, 1):
        for place, length in enumerate(LENGTHS):
            loss, margin = (known.get(name, (3.1, 4.0, 5.0))[place] for known in (LOSSES, MARGINS))
            cases = [
                CaseMargin(task="passkey", number=number, tokens=length, depth=0.5, margin=margin, found=margin > 3)
                for number in range(PLAN.cases[length / TRAINED])
            ]
            shifted = [
                case.model_copy(update={"margin": case.margin + 0.1 * (index * case.number % 5)}) for case in cases
            ]
            nats = [loss + 0.01 * document for document in range(PLAN.documents)]
            entries[name, length] = entry_of(length, nats, shifted, PLAN.documents)
    results = {name: empty_result(name, PLAN.documents, PLAN.seed) for name in PLAN.methods}
    results["clex"] = empty_result(
        "clex", PLAN.documents, PLAN.seed, "rope_scaling.rope_type: clex has learned weights"
    )
    seconds = {length: 60.0 * (place + 1) for place, length in enumerate(LENGTHS)}
    left_out = ("retrieval at 32768 tokens of ntk (about 1:23:45)",)
    return with_entries(StretchResult(results, timed(seconds, PLAN.methods), left_out), entries)
