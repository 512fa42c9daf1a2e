"""Values of `logit_scaling`: a factor on the logits of each query, which depends on the query's position."""

from megatron_coca.methods.declaration import LogitScaling, Option, Use, Values, declare


def _logarithm(use: Use) -> str | None:
    return "divides by ln L, which is 0 for seq_length 1; raise seq_length" if use.seq_length < 2 else None


def _training(length: int, given: Values) -> int:
    return length


declare(
    (
        LogitScaling(name="none", label="", source="Vaswani et al. 2017", huggingface="stock"),
        LogitScaling(
            "log_n",
            "log n",
            "Su 2023",
            meaning="scores grow with the logarithm of the position beyond the training length",
            rule="`max(1, ln(m+1)/ln L)`, at evaluation",
            evaluation_only=True,
            checks=(_logarithm,),
        ),
        LogitScaling(
            "log_n_trained",
            "log n trained",
            "Su 2021",
            meaning="scores grow with the logarithm of the position, also in training",
            rule="`ln(m+1)/ln L`, in training and at evaluation",
            trained=True,
            checks=(_logarithm,),
        ),
        LogitScaling(
            "ssmax",
            "SSMax",
            "Nakanishi 2025",
            meaning="scores grow with the logarithm of the position, at learned rates",
            rule="`s ln(m+1) + b`; every head of every layer learns `s` and, with `bias`, `b`",
            options=(
                Option("initial", "positive", "Initial s; 0.43 is 1 / ln 10.", default=0.43),
                Option("bias", "flag", "Also learn b, initially 0.", default=False),
            ),
            trained=True,
            learned=True,
            huggingface="the modelling file does not support learned factors",
            neox="GPT-NeoX has no weights for it",
        ),
        LogitScaling(
            "temperature",
            "temperature",
            "Llama 4 (period 8,192, positions from 1), Ministral 3 (period L, positions from 0)",
            meaning="scores grow slowly with the position",
            rule="`1 + a ln(1 + floor(m'/p))`, where `m'` is the position counted from `first`",
            options=(
                Option("strength", "positive", "Factor a of the logarithm.", default=0.1),
                Option(
                    "period",
                    "count",
                    "Number of tokens p after which the factor grows.",
                    by_length=_training,
                    shown="L",
                ),
                Option("first", "whole", "Number of the first position: 0 or 1.", default=0, most=1),
            ),
        ),
    )
)
