"""Tests of a file's declared contrasts (together with Holm's correction, or in a fixed sequence), and their power."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from megatron_coca.ablation.grid import AblationFile, DeclaredContrast
from megatron_coca.evaluation.statistics import Estimate, estimate, exponential, holm, p_value, power

LEVEL = 0.05

Verdict = Literal["holds", "does not hold", "not tested"]


class Declared(NamedTuple):
    """A declared contrast with its mean difference over seeds (of logarithms for perplexities).

    `p` is the p-value of the paired t test; `holm` is this p-value corrected for all contrasts of the file.
    """

    contrast: DeclaredContrast
    difference: Estimate
    p: float
    holm: float


class Step(NamedTuple):
    """A contrast of a sequence. If the verdict is "not tested", `p` is not the result of a test."""

    contrast: DeclaredContrast
    difference: Estimate
    p: float
    verdict: Verdict


Differences = Sequence[float]
"""Differences of one contrast, paired by seed."""


def together(found: Sequence[tuple[DeclaredContrast, Differences]], count: int) -> list[Declared]:
    """Return the contrasts with at least two seeds, with p-values corrected for all `count` declared contrasts."""
    known = [(contrast, differences) for contrast, differences in found if len(differences) > 1]
    p_values = [p_value(differences) for _, differences in known]
    missing = count - len(known)  # these contrasts count too, so that an unfinished study does not claim more
    corrected = holm(p_values + [1.0] * missing)
    return [
        Declared(contrast, estimate(differences), p, own)
        for (contrast, differences), p, own in zip(known, p_values, corrected, strict=False)
    ]


def in_sequence(found: Sequence[tuple[DeclaredContrast, Differences]], seeds: int) -> list[Step]:
    """Return the steps of a sequence; empty until every contrast has all `seeds`, because each is tested only once."""
    if any(len(differences) < max(seeds, 2) for _, differences in found):
        return []
    steps: list[Step] = []
    for contrast, differences in found:
        p = p_value(differences)
        verdict: Verdict = "holds" if p < LEVEL else "does not hold"
        if any(step.verdict != "holds" for step in steps):
            verdict = "not tested"
        steps.append(Step(contrast, estimate(differences), p, verdict))
    return steps


def power_of(file: AblationFile, contrast: DeclaredContrast, share: float = 1.0) -> float | None:
    """Return a contrast's power with all seeds of the file, if the true difference is `share` of the expected one.

    Return None if the contrast declares no expected difference. For a sequence, this is the power if all contrasts
    before it hold. For contrasts tested together, it is the power at the smallest level of Holm's correction, which is
    a lower bound.
    """
    if contrast.expected is None or contrast.deviation is None:
        return None
    level = LEVEL if file.testing == "sequence" else LEVEL / len(file.contrasts)
    return power(share * contrast.expected / contrast.deviation, len(file.seeds), level)


def plan(file: AblationFile) -> list[str]:
    """Return a sentence on how the contrasts are tested, and one on the power of each contrast, in Markdown."""
    if not file.contrasts:
        return []
    count, seeds = len(file.contrasts), len(file.seeds)
    how = f"The p-values of {count} contrasts are corrected together (Holm)."
    if file.testing == "sequence":
        how = (
            f"The first of {count} contrasts is the primary contrast. Each is tested once, when all {seeds} seeds are "
            "finished, at a level of 5%, and only if all contrasts before it hold."
        )
    return [how, *(f"{number}. {contrast.name}: {_power(file, contrast)}" for number, contrast in _numbered(file))]


def outcome(file: AblationFile, steps: Sequence[Step]) -> list[str]:
    """Return sentences that describe the results of a sequence, in Markdown."""
    if not steps:
        return [f"Nothing is tested yet: each contrast is tested once, when all {len(file.seeds)} seeds are finished."]
    held = [step.verdict for step in steps].count("holds")
    if held == len(steps):
        text = " holds." if held == 1 else f" holds, and so do all {held} contrasts of the sequence."
    elif held:
        text = f" holds; the sequence ends at contrast {held + 1} of {len(steps)}, which does not hold."
    else:
        text = " does not hold; no other contrast is tested."
    lines = []
    for number, step in enumerate(steps, 1):
        tested = "not tested" if step.verdict == "not tested" else f"p = {step.p:.2g}, {step.verdict}"
        lines.append(f"{number}. {step.contrast.name}: {amount(step.contrast, step.difference)}; {tested}")
    return [f"The primary contrast{text}", *lines]


def claim(file: AblationFile, tested: Sequence[Declared], steps: Sequence[Step]) -> str:
    """Return one sentence on the first contrast of a file; empty if it was not tested.

    `tested` are the contrasts of a file that tests them together, and `steps` those of a file with a sequence.
    """
    if not file.contrasts:
        return ""
    first = file.contrasts[0]
    if file.testing == "sequence":
        if not steps:
            return outcome(file, steps)[0]
        held, difference = steps[0].verdict == "holds", steps[0].difference
        p = f"p = {steps[0].p:.2g}"
    else:
        found = next((each for each in tested if each.contrast == first), None)
        if found is None:
            return ""
        held, difference = found.holm < LEVEL, found.difference
        count = len(file.contrasts)
        p = f"p = {found.holm:.2g}" + (f", corrected for {count} contrasts" if count > 1 else "")
    verdict = "the declared contrast holds" if held else "no difference is shown"
    if held and first.expected is not None and first.expected * difference.mean < 0:  # the test is two-sided
        verdict = "the difference is opposite to the expected one"
    return f"{first.name}: {amount(first, difference)}; {verdict} ({p})."


def amount(contrast: DeclaredContrast, difference: Estimate) -> str:
    """Return a difference of accuracy, or a ratio of perplexities, with its 95% interval if there is one."""
    mean, low, high = difference.mean, difference.low, difference.high
    if contrast.quantity != "recall":
        text, ends = f"{exponential(mean):.3f} times", f"{exponential(low):.3f} to {exponential(high):.3f}"
    else:
        text, ends = f"a difference of {mean:.2f}", f"{low:.2f} to {high:.2f}"
    return f"{text} ({'no interval: the seeds do not differ' if math.isnan(low) else ends})"


def _numbered(file: AblationFile) -> list[tuple[int, DeclaredContrast]]:
    return list(enumerate(file.contrasts, 1))


def _power(file: AblationFile, contrast: DeclaredContrast) -> str:
    whole, half = (power_of(file, contrast, share) for share in (1.0, 0.5))
    if whole is None or half is None or contrast.expected is None:
        return "power not computed, because the file declares no expected difference"
    logarithm = "" if contrast.quantity == "recall" else " of logarithms"
    return (
        f"power {whole:.2f} for a difference{logarithm} of {contrast.expected:g} with a standard deviation of "
        f"{contrast.deviation:g} over seeds, {half:.2f} for half the difference"
    )
