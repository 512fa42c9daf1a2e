"""The page that compares fine-tuned models with the control, the original model and the methods without training.

The results of all models form one `StretchResult`, with the same facts and the same scored tokens at the same lengths.
So this page has the same tables, picture and decision as the page of methods without training.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_coca.config import Config
from megatron_coca.evaluation.contrasts import level_text, simultaneous
from megatron_coca.evaluation.report.document import EMPTY, ReportBlock, Section, Table, TableCell, TableRow
from megatron_coca.evaluation.statistics import Estimate, estimate, geometric_estimate
from megatron_coca.evaluation.stretch.choices import CONTROL, TRAINED
from megatron_coca.evaluation.stretch.decision import Decision, decide, difference_of_shares
from megatron_coca.evaluation.stretch.page import write_page
from megatron_coca.evaluation.stretch.plans import Plan
from megatron_coca.evaluation.stretch.records import StretchResult, read_results
from megatron_coca.support.console import duration


@dataclass(frozen=True)
class Trial:
    """A fine-tuned model.

    Attributes:
        method: name of its method in `FINETUNED`.
        folder: save folder of its training run.
        page: folder of its page and results.
        config: its configuration.
        steps, tokens: number of training steps and of trained tokens.
        seconds: time of the training steps.
        memory: peak memory in GiB, or None if it was not reported.
    """

    method: str
    folder: Path
    page: Path
    config: Config
    steps: int
    tokens: int
    seconds: float
    memory: float | None

    @property
    def name(self) -> str:
        """The name of the model on the page."""
        return f"{self.method}{TRAINED}"


ALL = "trained"
"""Name of the folder with the page of all models."""


def write_trials(
    before: StretchResult,
    untrained: Mapping[str, Config],
    trials: Sequence[Trial],
    output: Path,
    plan: Plan | None = None,
) -> tuple[str, Decision]:
    """Write the page of all models to `output`, and return its text and its decision.

    `before` has the results before fine-tuning, and `untrained` has the configurations of the methods in `before`. The
    first of `trials` is the control. The contrasts of `plan` are added. Raises EvaluationError.
    """
    results, costs = dict(before.results), dict(before.costs)
    for trial in trials:
        after = read_results(trial.page, ())
        results[trial.name], costs[trial.name] = after.header, after.costs[after.plain]
    result = StretchResult(results, costs)
    configs = {**untrained, **{trial.name: trial.config for trial in trials}}
    output.mkdir(parents=True, exist_ok=True)
    blocks = [ReportBlock(tables=(training_table(trials),)), ReportBlock(tables=(difference_table(result, trials),))]
    text = write_page(result, configs, output, plan, [Section("training", "Fine-tuning", tuple(blocks))])
    return text, decide(result)


def training_table(trials: Sequence[Trial]) -> Table:
    """Return the table of steps, tokens, time and memory, with a row for each fine-tuned model."""
    rows = []
    for trial in trials:
        memory = EMPTY if trial.memory is None else TableCell(f"{trial.memory:.1f}", trial.memory)
        seconds = TableCell(duration(math.ceil(trial.seconds)), trial.seconds)
        counts = TableCell(f"{trial.steps:,}", trial.steps), TableCell(f"{trial.tokens:,}", trial.tokens)
        rows.append(TableRow(trial.name, (*counts, seconds, memory, TableCell(trial.folder.name))))
    note = f"`{CONTROL}` is the control: the same tokens and the same rate, and nothing else changes."
    return Table(
        "training", "What was trained", ("model", "steps", "tokens", "time", "GiB", "folder"), tuple(rows), (note,)
    )


def difference_table(result: StretchResult, trials: Sequence[Trial]) -> Table:
    """Return the table of differences between models, with a row for each pair and length.

    A fine-tuned model is compared with the control and, if it was measured, with the same method without training. The
    control is compared with the original model.
    """
    control, *others = trials
    pairs = [(trial.name, control.name) for trial in others]
    pairs += [(trial.name, trial.method) for trial in others if trial.method in result.supported]
    pairs.append((control.name, result.plain))
    lengths = [length for length in result.lengths() if result.windows(control.name, length)]
    inside = simultaneous(len(pairs) * len(lengths))
    rows = [_differences(result, one, other, length, inside) for one, other in pairs for length in lengths]
    header = ("model", "minus", "tokens", "perplexity", "facts", "margin (nats)")
    return Table(
        "differences",
        "Fine-tuned models beside the control and beside the same method without training",
        header,
        tuple(rows),
        (
            "Perplexity is a ratio, in the same windows. Facts and margins are differences, paired by fact. Each "
            f"interval has a confidence of {level_text(inside)}, so that all intervals of a column hold together in "
            "95% of cases.",
        ),
    )


def _differences(result: StretchResult, one: str, other: str, length: int, inside: float) -> TableRow:
    facts = list(zip(result.facts(one, length), result.facts(other, length), strict=False))
    losses = list(zip(result.losses(one, length), result.losses(other, length), strict=False))
    found = [float(mine.found) - float(theirs.found) for mine, theirs in facts]
    cells = [EMPTY, EMPTY, EMPTY]
    if losses:
        ratio = geometric_estimate([mine - theirs for mine, theirs in losses], inside)
        cells[0] = _cell(ratio, "{:.3f}")
    if facts:
        share = difference_of_shares(found, inside)
        margin = estimate([mine.margin - theirs.margin for mine, theirs in facts], inside)
        cells[1:] = _cell(share, "{:+.0%}"), _cell(margin, "{:+.1f}")
    return TableRow(one, (TableCell(other), TableCell(f"{length:,}", length), *cells))


def _cell(found: Estimate, form: str) -> TableCell:
    ends = "" if math.isnan(found.low) else f"{form.format(found.low)} to {form.format(found.high)}, "
    return TableCell(form.format(found.mean), found.mean, f"{ends}n = {found.count}")
