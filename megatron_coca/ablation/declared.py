"""Sentences on the declared contrasts of a file: how they are tested, the power of each test, and the results."""

import math
from collections.abc import Sequence

from megatron_coca.ablation.file import AblationFile, DeclaredContrast
from megatron_coca.evaluation.contrasts import (
    LEVEL,
    ContrastVerdict,
    Declared,
    Differences,
    Step,
    in_sequence,
    level_text,
    p_text,
    power_of,
    verdict_of,
)
from megatron_coca.evaluation.labels import in_sentence
from megatron_coca.evaluation.statistics import Estimate, equal, exponential


def steps_of(found: Sequence[tuple[DeclaredContrast, Differences]], seeds: int) -> list[Step[DeclaredContrast]]:
    """Return the steps of a sequence, or an empty list if a contrast has fewer differences than `seeds`.

    Each contrast is tested only once, when all seeds are finished.
    """
    return [] if any(len(differences) < max(seeds, 2) for _, differences in found) else in_sequence(found)


def level_of(file: AblationFile) -> float:
    """Return the level at which the power is computed.

    For contrasts tested together, it is the smallest level of Holm's correction, so the power is a lower bound. In a
    sequence, it is LEVEL, because a contrast is tested only if all contrasts before it hold.
    """
    return LEVEL if file.testing == "sequence" else LEVEL / len(file.contrasts)


def plan(file: AblationFile) -> list[str]:
    """Return a sentence on how the contrasts are tested, and a sentence on the power of each contrast, in Markdown."""
    if not file.contrasts:
        return []
    count, seeds = len(file.contrasts), len(file.seeds)
    how = f"The p-values and intervals of {count} two-sided contrasts are corrected together (Holm)."
    if file.testing == "sequence":
        how = (
            f"The first of {count} contrasts is the primary contrast. Each is tested once, when all {seeds} seeds are "
            "finished, at a two-sided level of 5%, and only if all contrasts before it hold."
        )
    return [how, *(f"{number}. {contrast.name}: {_power(file, contrast)}" for number, contrast in _numbered(file))]


def outcome(file: AblationFile, steps: Sequence[Step[DeclaredContrast]]) -> list[str]:
    """Return sentences that describe the results of a sequence, in Markdown."""
    if not steps:
        return [f"Nothing is tested yet: each contrast is tested once, when all {len(file.seeds)} seeds are finished."]
    held = [step.verdict for step in steps].count("holds")
    if held == len(steps):
        text = " holds." if held == 1 else f" holds, and so do all {held} contrasts of the sequence."
    elif held:
        text = f" holds; the sequence ends at contrast {held + 1} of {len(steps)}, which {steps[held].verdict}."
    else:
        text = f" {steps[0].verdict}; no other contrast is tested."
    lines = []
    for number, step in enumerate(steps, 1):
        tested = "not tested" if step.verdict == "not tested" else f"p = {p_text(step.p)}, {step.verdict}"
        lines.append(f"{number}. {step.contrast.name}: {amount(step.contrast, step.difference)}; {tested}")
    if any(step.contrast.is_recall and not step.contrast.weights for step in steps):
        text += " A difference of recall is that of the first model minus that of the second."
    return [f"The primary contrast{text}", *lines]


def claim(
    file: AblationFile,
    tested: Sequence[Declared[DeclaredContrast]],
    steps: Sequence[Step[DeclaredContrast]],
) -> str:
    """Return one sentence on the first contrast of a file, or "" if there is no such contrast.

    `steps` has the results of a file with `testing: sequence`. For other files, `tested` has the results, and the
    sentence is also "" if the first contrast was not tested.
    """
    if not file.contrasts:
        return ""
    first, level, count = file.contrasts[0], 1.0 - LEVEL, 1
    if file.testing == "sequence":
        if not steps:
            return outcome(file, steps)[0]
        p, difference = steps[0].p, steps[0].difference
    else:
        found = next((each for each in tested if each.contrast == first), None)
        if found is None:
            return ""
        p, difference, level, count = found.holm, found.difference, found.level, len(file.contrasts)
    if not math.isfinite(difference.mean):
        names = first.title or f"{in_sentence(first.label)} and {in_sentence(first.other)}"
        return f"{_place(first)}, the {_quantity(first)} of {names} cannot be compared: {INFINITE}."
    verdict = VERDICTS[verdict_of(first.expected, difference, p)].format(count=difference.count)
    what = "" if math.isnan(difference.low) else "; p-value and interval are"
    correction = f"{what or ','} corrected for {count} contrasts" if count > 1 else ""
    shown = "" if math.isnan(p) else f" (two-sided p = {p_text(p)}{correction})"
    return f"{_place(first)}, {_statement(first, difference, level)}; {verdict}{shown}."


VERDICTS: dict[ContrastVerdict, str] = {
    "holds": "this difference is significant",
    "holds in the opposite direction": "this difference is significant, but opposite to the expected one",
    "does not hold": "no significant difference is shown",
    "cannot be tested": "the t test is undefined, because all {count} seeds differ by the same amount",
}
"""The words for each verdict in the sentence at the top of a report."""


INFINITE = "at least one seed has no finite difference"


def _place(contrast: DeclaredContrast) -> str:
    at = contrast.at
    if contrast.quantity == "validation perplexity":
        return "After the training" if at == 1 else f"After {100 * at:g}% of the training steps"
    return "At the training length" if at == 1 else f"At {at:g} times the training length"


def _statement(contrast: DeclaredContrast, difference: Estimate, level: float) -> str:
    """Return the difference in words, with its interval at the confidence `level` if there is one."""
    ours, theirs = in_sentence(contrast.label), in_sentence(contrast.other)
    mean, low, high = difference.mean, difference.low, difference.high
    if contrast.weights:
        return f"{contrast.title} ({_quantity(contrast)}): {amount(contrast, difference)}"
    if contrast.is_recall:
        if mean < 0:
            mean, low, high = -mean, -high, -low
        shown, low_end, high_end = _with_difference((mean, low, high), 2, 0.0)
        change = f"is {shown} {'lower' if difference.mean < 0 else 'higher'} than"
        text = f"the {_quantity(contrast)} of {ours} {'equals' if equal([mean, 0.0]) else change} that of {theirs}"
    else:
        shown, low_end, high_end = _with_difference(tuple(map(exponential, (mean, low, high))), 3, 1.0)
        text = f"the {_quantity(contrast)} of {ours} is {shown} times that of {theirs}"
    return text if math.isnan(low) else f"{text} ({level_text(level)} interval: {low_end} to {high_end})"


def _with_difference(numbers: Sequence[float], digits: int, none: float) -> list[str]:
    """Return the numbers with at least `digits` digits after the decimal point.

    Digits are added, up to MOST_DIGITS, until the first number differs from `none`, which stands for no difference.
    """
    needed = (each for each in range(digits, MOST_DIGITS + 1) if f"{numbers[0]:.{each}f}" != f"{none:.{each}f}")
    digits = next(needed, digits)
    return [f"{number:.{digits}f}" for number in numbers]


MOST_DIGITS = 6


def _quantity(contrast: DeclaredContrast) -> str:
    return QUANTITIES.get(contrast.quantity, contrast.quantity)


QUANTITIES = {
    "ratio": "perplexity relative to that at the training length",
    "recall kinds": "recall (the mean over the kinds of questions)",
    "recall latest": "recall of the latest value of a key",
    "recall first": "recall of the first value of a key",
    "recall back": "recall of the value told some facts before",
}
"""Words for quantities with names that readers would not understand."""


def amount(contrast: DeclaredContrast, difference: Estimate) -> str:
    """Return a difference of recall with its sign, or a ratio of perplexities. Add the 95% interval if there is one."""
    mean, low, high = difference.mean, difference.low, difference.high
    if not math.isfinite(mean):
        return INFINITE
    if not contrast.is_recall:
        text, ends = f"{exponential(mean):.3f} times", f"{exponential(low):.3f} to {exponential(high):.3f}"
    else:
        text, ends = f"{mean:+.2f}", f"{low:+.2f} to {high:+.2f}"
    return f"{text} ({'no interval: the seeds do not differ' if math.isnan(low) else ends})"


def _numbered(file: AblationFile) -> list[tuple[int, DeclaredContrast]]:
    return list(enumerate(file.contrasts, 1))


def _power(file: AblationFile, contrast: DeclaredContrast) -> str:
    if contrast.expected is None:
        return "power not computed, because the file declares no expected difference"
    whole, half = (power_of(contrast, len(file.seeds), level_of(file), share) for share in (1.0, 0.5))
    if whole is None or half is None:
        return "power not computed, because a test needs at least two seeds"
    logarithm = "" if contrast.is_recall else " of logarithms"
    return (
        f"power {whole:.2f} for a difference{logarithm} of {contrast.expected:g} with a standard deviation of "
        f"{contrast.deviation:g} over seeds, {half:.2f} for half the difference"
    )
