"""What a report has sections for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_coca.evaluation.report import provenance
from megatron_coca.evaluation.report.document import Block, Section
from megatron_coca.evaluation.report.parts import (
    analysis,
    costs,
    harness,
    needle,
    passkey,
    perplexity,
    rerope,
    ruler,
    speed,
    strict,
)
from megatron_coca.evaluation.report.reading import RESULT_TYPES, Loaded

EVERY = tuple(RESULT_TYPES)


@dataclass(frozen=True)
class Part:
    """A section: the tasks whose results it is made of, and what makes its blocks; none without any."""

    name: str
    title: str
    tasks: tuple[str, ...]
    build: Callable[[Sequence[Loaded], bool], list[Block]]
    printed: bool = True


PARTS = (
    Part("perplexity", "Perplexity beyond the training length", ("perplexity",), perplexity.build),
    Part("rerope", "Loss with windowed relative positions", ("perplexity",), rerope.build),
    Part("passkey", "Passkey retrieval", ("passkey",), passkey.build),
    Part("strict", "CoCA-Strict against CoCA-Slack", ("perplexity", "passkey"), strict.build),
    Part("needle", "A needle in a haystack", ("needle",), needle.build),
    Part("ruler", "RULER-style tasks", ("ruler",), ruler.build),
    Part("short", "Short-context tasks", ("lm-eval",), harness.build),
    Part("speed", "Speed and memory", ("speed",), speed.build),
    Part("analysis", "Analysis of attention", ("analyse",), analysis.build),
    Part(
        "models",
        "What was measured",
        tuple(task for task in EVERY if task != "speed"),
        provenance.models,
        printed=False,
    ),
    Part("costs", "What measuring cost", EVERY, costs.build, printed=False),
)
"""The sections in their order. A new task adds a row here and one to `RESULT_TYPES`."""


def build_sections(loaded: Sequence[Loaded], papers: bool) -> tuple[Section, ...]:
    """Those that there is something for. Raises EvaluationError for labels that stand for two models."""
    sections = []
    for part in PARTS:
        chosen = [each for each in loaded if each.result.task in part.tasks]
        if chosen and (blocks := part.build(chosen, papers)):
            sections.append(Section(part.name, part.title, tuple(blocks), part.printed))
    return tuple(sections)
