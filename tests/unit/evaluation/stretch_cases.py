"""Results of `megatron-coca stretch` made by hand: nine methods at three lengths."""

from pathlib import Path

from megatron_coca.config import Config, load_config
from megatron_coca.evaluation.results import CheckpointRecord, EnvironmentRecord
from megatron_coca.evaluation.stretch.choices import chosen_methods
from megatron_coca.evaluation.stretch.measuring import PROTOCOL, CaseMargin
from megatron_coca.evaluation.stretch.plans import Plan, read_plan
from megatron_coca.evaluation.stretch.records import Losses, MethodRecord, Retrieval, Settings, StretchResult

TRAINED, SCORED = 8192, 1024
LENGTHS = (8192, 16384, 32768)
SHAPE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": TRAINED, "vocab_size": 512}
SHAPE |= {"pos_emb": "rotary"}
PLAN: Plan = read_plan(Path(__file__).parents[3] / "configs/study/real_model.yml")
LOSSES = {"plain": (3.0, 6.0, 8.0), "yarn:2": (3.02, 3.04, 5.0), "rerope+log_n": (3.01, 3.02, 3.03)}
"""Nats per token of some methods by length; the others are between them."""
MARGINS = {"plain": (9.0, -8.0, -9.0), "yarn:2": (8.0, 6.0, -5.0), "rerope+log_n": (8.5, 2.0, 1.0)}


def config_of(name: str) -> Config:
    (_, *found) = chosen_methods([name], PLAN.to, TRAINED)
    return load_config(SHAPE, found[0].overrides if found else ())


def stretch_result() -> StretchResult:
    """The whole plan of configs/study/real_model.yml, and a method that the model does not support."""
    checkpoint = CheckpointRecord(path="models/smollm2", identity="1", step=None, seq_length=TRAINED, pos_emb="rotary")
    environment = EnvironmentRecord(dtype="bfloat16", backend="sdpa", device="cpu", torch="2.13.0")
    settings = Settings(
        checkpoint=checkpoint,
        tokenizer="1",
        environment=environment,
        documents="1",
        text=PROTOCOL,
        count=PLAN.documents,
        scored=SCORED,
        start=None,
        chat=True,
        to=PLAN.to,
        seed=PLAN.seed,
    )
    methods = [MethodRecord(name=name, overrides={}) for name in PLAN.methods]
    methods.append(MethodRecord(name="clex", overrides={}, error="rope_scaling.rope_type: clex has learned weights"))
    losses, retrieval = [], []
    for index, name in enumerate(PLAN.methods, 1):
        for place, length in enumerate(LENGTHS):
            loss, margin = (known.get(name, (3.1, 4.0, 5.0))[place] for known in (LOSSES, MARGINS))
            nlls = [SCORED * (loss + 0.01 * document) for document in range(PLAN.documents)]
            fields = {"method": name, "length": length, "seconds": 60.0 * (place + 1), "complete": True}
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
