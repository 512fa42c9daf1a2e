"""The default learning rate of a run that starts from the weights of a model (docs/finetuning.md)."""

from math import inf

from megatron_coca.config import Config, ConfigError

KEY = "optimizer.params.lr"
NO_RATE = f"{KEY}: not set; training needs it, for example `{KEY}=1e-4`"
RATES = ((0.25e9, 1e-4), (1e9, 5e-5), (5e9, 3e-5), (25e9, 2e-5), (inf, 1e-5))
"""Pairs of a number of parameters, without embedding and head, and the peak rate that applies up to this number.

From 5 billion parameters on, these are the rates of published runs that continue a model. Below, they are between a
fifth and a seventh of the rates with which GPT-3 models of these sizes were trained (Brown et al. 2020, table 2.1).
"""
ADAM = ("Adam", "AdamW", "cpu_adam")
"""The optimizers to which these rates belong."""


def has_starting_rate(config: Config) -> bool:
    """Return whether the run has a default learning rate, because it starts from a model. With `use_mup` it has none,
    because these rates are for the standard parametrization.
    """
    keys = config.checkpoint
    own = config.optimizer.type in ADAM and not config.model.use_mup
    return keys.finetune and keys.load is not None and own


def with_starting_rate(config: Config) -> tuple[Config, str | None]:
    """Return the configuration with a learning rate, and a log line about the default rate, or None if it is not used.

    Raises:
        ConfigError: the rate contradicts another key, such as a larger `min_lr`.
    """
    if config.optimizer.lr is not None or not has_starting_rate(config):
        return config, None
    from megatron_coca.model.cost import parameter_count  # imports PyTorch, which `has_starting_rate` does not need

    # The vocabulary, which may only be known when the data are open, does not change the count.
    known = config if config.model.vocab_size is not None else config.override({"vocab_size": 1})
    count = parameter_count(known).non_embedding
    rate = next(rate for most, rate in RATES if count <= most)
    note = (
        f"{KEY}: not set; uses {rate:g}, the default for starting from a model with {count:,} parameters without "
        "embedding and head (docs/finetuning.md)"
    )
    try:
        return config.override({KEY: rate}), note
    except ConfigError as error:
        raise ConfigError(note, *error.problems) from error
