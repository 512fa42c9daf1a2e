"""Values of `rotary_frequencies.type`: rotary frequencies that replace base^(-2j/d) in training."""

import math

from megatron_coca.methods.declaration import Option, TrainingFrequencies, Use, Values, declare


def _period(length: int, given: Values) -> float:
    """Return the default of `period`: 32 tokens, as in the paper. For lengths below 4,096, it is 1/128 of the length,
    which is the ratio in the paper. It is never below 2 pi, the period of RoPE's fastest frequency.
    """
    return min(32.0, max(2 * math.pi, length / 128))


def _faster_and_slower(use: Use) -> str | None:
    slowest, period = use.original_length / use.options["turns"], use.options["period"]
    if slowest > period:
        return None
    return (
        f"the slowest pair rotates once in L / turns = {slowest:g} tokens, which is not slower than the fastest pair"
        f" (period {period:g}); lower period or turns, or raise seq_length"
    )


declare(
    (
        TrainingFrequencies(
            "rope_id",
            "RoPE-ID",
            "RoPE-ID, Wertheimer et al. 2026",
            meaning="frequencies that all turn at least twice within the training length",
            rule="geometric, from `2 pi / period` to `2 pi turns / L`",
            options=(
                Option("turns", "factor", "Rotations of the slowest pair within L.", default=2.0),
                Option(
                    "period",
                    "positive",
                    "Tokens per rotation of the fastest pair.",
                    least=2.0,
                    by_length=_period,
                    shown="L/128, at least 2 pi and at most 32",
                ),
            ),
            trained=True,
            checks=(_faster_and_slower,),
        ),
    )
)
