"""Values of `logit_scaling`: a factor on the logits of each query by its position."""

from megatron_coca.methods.declaration import LogitScaling, Use, declare


def _logarithm(use: Use) -> str | None:
    return "divides by ln L, which is 0 for a training length of 1" if use.seq_length < 2 else None


declare(
    (
        LogitScaling(name="none", label="", source="Vaswani et al. 2017", huggingface="stock"),
        LogitScaling("log_n", "log n", "Su 2023", rule="`max(1, ln(m+1)/ln L)`, at evaluation", checks=(_logarithm,)),
        LogitScaling(
            "log_n_trained",
            "log n trained",
            "Su 2021",
            rule="`ln(m+1)/ln L`, from the first step of training on",
            trained=True,
            checks=(_logarithm,),
        ),
    )
)
