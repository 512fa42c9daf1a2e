"""Results of `megatron-coca stretch` made by hand: nine methods at three lengths."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_coca.config import Config, load_config
from megatron_coca.evaluation.results import CheckpointRecord, EnvironmentRecord
from megatron_coca.evaluation.stretch.choices import chosen_methods
from megatron_coca.evaluation.stretch.plans import Plan, read_plan
from megatron_coca.evaluation.stretch.records import Losses, MethodRecord, Retrieval, StretchResult, StretchSettings
from megatron_coca.evaluation.tasks.margin.measure import PROTOCOL
from megatron_coca.evaluation.tasks.margin.task import CaseMargin

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


def settings_of(documents: int, to: float, seed: int) -> StretchSettings:
    checkpoint = CheckpointRecord(path="models/smollm2", identity="1", step=None, seq_length=TRAINED, pos_emb="rotary")
    environment = EnvironmentRecord(dtype="bfloat16", backend="sdpa", device="cpu", torch="2.13.0")
    return StretchSettings(
        checkpoint=checkpoint,
        tokenizer="1",
        environment=environment,
        documents="1",
        text=PROTOCOL,
        count=documents,
        scored=SCORED,
        start=None,
        chat=True,
        to=to,
        seed=seed,
    )


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
    made, hidden = [], []
    for name in names:
        for length in (TRAINED, 2 * TRAINED):
            own = facts.get(name, {}).get(length, [(True, 9.0)] * 4 if length == TRAINED else [])
            at = {"method": name, "length": length, "seconds": 8.0}
            tasks = ("passkey", "needle")
            cases = [
                CaseMargin(task=tasks[number % 2], number=number, tokens=length, depth=0.5, margin=margin, found=found)
                for number, (found, margin) in enumerate(own)
            ]
            hidden += [Retrieval(**at, cases=cases)] if cases else []
            made.append(Losses(**at, nlls=[SCORED * nats for nats in given.get((name, length), [3.01])]))
    methods = [MethodRecord(name=name, overrides={}) for name in names]
    return StretchResult(settings=settings_of(4, 2.0, 0), methods=methods, losses=made, retrieval=hidden)


def stretch_result() -> StretchResult:
    """The whole plan of studies/real_model/plan.yml, and a method that the model does not support."""
    settings = settings_of(PLAN.documents, PLAN.to, PLAN.seed)
    methods = [MethodRecord(name=name, overrides={}) for name in PLAN.methods]
    methods.append(MethodRecord(name="clex", overrides={}, error="rope_scaling.rope_type: clex has learned weights"))
    losses, retrieval = [], []
    for index, name in enumerate(PLAN.methods, 1):
        for place, length in enumerate(LENGTHS):
            loss, margin = (known.get(name, (3.1, 4.0, 5.0))[place] for known in (LOSSES, MARGINS))
            nlls = [SCORED * (loss + 0.01 * document) for document in range(PLAN.documents)]
            fields = {"method": name, "length": length, "seconds": 60.0 * (place + 1)}
            losses.append(Losses(**fields, nlls=nlls))
            cases = [
                CaseMargin(task="passkey", number=number, tokens=length, depth=0.5, margin=margin, found=margin > 3)
                for number in range(PLAN.cases[length / TRAINED])
            ]
            shifted = [
                case.model_copy(update={"margin": case.margin + 0.1 * (index * case.number % 5)}) for case in cases
            ]
            retrieval.append(Retrieval(**fields, cases=shifted))
    left_out = ["retrieval at 32768 tokens of ntk (about 1:23:45)"]
    return StretchResult(settings=settings, methods=methods, losses=losses, retrieval=retrieval, left_out=left_out)
