"""The position methods that `megatron-coca stretch` compares, both without training and after fine-tuning."""

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_coca.evaluation.results import EvaluationError

PLAIN = "plain"
MOST = 1024
"""The largest value of `--to`. This option sets the longest measured input, as a multiple of the training length."""

Changes = Callable[[float, int], list[str]]
"""A function that returns config overrides for an extension factor and a training length in tokens."""


def _extension(kind: str) -> Changes:
    return lambda factor, length: [f"rope_scaling.rope_type={kind}", f"rope_scaling.factor={factor:g}"]


def _map(kind: str, *more: str) -> Changes:
    return lambda factor, length: [f"relative_positions.type={kind}", *more]


CHOICES: dict[str, Changes] = {
    PLAIN: lambda factor, length: [],
    "pi": _extension("linear"),
    "ntk": _extension("ntk"),
    "dynamic": _extension("dynamic"),
    "yarn": _extension("yarn"),
    "dynamic_yarn": lambda factor, length: ["rope_scaling.rope_type=dynamic_yarn"],
    "log_n": lambda factor, length: ["logit_scaling=log_n"],
    "rerope": _map("rerope"),
    "rerope+log_n": _map("rerope", "logit_scaling=log_n"),
    "leaky_rerope": _map("leaky_rerope"),
    "self_extend": lambda factor, length: [
        "relative_positions.type=self_extend",
        f"relative_positions.group_size={max(2, 2 * math.ceil(factor))}",  # the window is half of the training length
    ],
    "dual_chunk": _map("dual_chunk"),
    "lm_infinite": _map("lm_infinite"),
}
"""The config overrides of each method. In `yarn:4`, the factor is 4. In `yarn`, it is the value of `--to`."""

CONTROL = "none"
"""The fine-tuning that changes no config key. Tokens and learning rate are the same as for the other methods."""


def _original(kind: str) -> Changes:
    """Return the changes for an extension that is fine-tuned, possibly at a length other than the training length."""
    return lambda factor, length: [
        *_extension(kind)(factor, length),
        f"rope_scaling.original_max_position_embeddings={length}",
    ]


STAGES = (
    "{until: 33%, trainable: [key]}",
    "{until: 67%, trainable: [query, key, value], reset_optimizer: true}",
    "{reset_optimizer: true}",
)
"""The stages of the CoCA paper. They train the T projection, which replaces K, then Q, T and V, then all weights."""
LATENT_STAGES = ("{until: 33%, trainable: [key, value]}", *STAGES[1:])
"""The stages for latent attention. There, one matrix computes both T and V, so the first stage trains both."""
FINETUNED: dict[str, Changes] = {
    CONTROL: lambda factor, length: [],
    "pi": _original("linear"),
    "yarn": _original("yarn"),
    "coca": lambda factor, length: ["pos_emb=coca"],
    "coca_stages": lambda factor, length: ["pos_emb=coca", f"stages=[{', '.join(STAGES)}]"],
    "drope": lambda factor, length: ["pos_emb=none", "rope_scaling=null", "relative_positions=null"],
    "rope_id": lambda factor, length: ["rotary_frequencies.type=rope_id"],
    "pope": lambda factor, length: ["pos_emb=pope"],
    "partial": lambda factor, length: ["rotary_pct=0.25"],
    "log_n_trained": lambda factor, length: ["logit_scaling=log_n_trained"],
}
"""The config overrides of each method of `--finetune-method`. The factor is the value of `--to`."""
TRAINED = " (trained)"
"""The suffix of the name of a fine-tuned model on a page."""
MOST_LENGTH = 2048
"""Largest default of `--finetune-length`. If the training length is shorter, it is the default."""
OWN_WEIGHTS = ("pope",)
"""The fine-tuned methods that add weights to the model. Even with `--lora`, these weights are trained directly."""
LORA = "{{rank: 16, alpha: 32, also: [{also}]}}"
"""The config key `lora` of a trial with `--lora`. The parts in `also` are trained directly, without adapters."""
RATE, LORA_RATE = "2e-5", "2e-4"
"""The learning rates of a trial. RATE is from the CoCA paper. LORA_RATE, which adapters use, is from QLoRA."""

DEFAULT = (PLAIN, "dynamic:2", "yarn", "rerope", "rerope+log_n", "self_extend", "dual_chunk", "lm_infinite")
_NAME = re.compile(r"([a-z_+]+)(?::(\d+(?:\.\d+)?))?")


class Method(NamedTuple):
    """A compared method, with its name in tables and the config overrides that select it."""

    name: str
    overrides: tuple[str, ...]


def chosen_methods(names: Sequence[str], to: float, length: int, place: str = "--methods") -> list[Method]:
    """Return the methods with these names, `plain` first. Raises EvaluationError for an unknown name.

    `place` names the option or file in messages.
    """
    found = {}
    for name in dict.fromkeys((PLAIN, *names)):
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in CHOICES:
            raise EvaluationError(f"{place} {name}: unknown method; name some of {', '.join(CHOICES)}")
        factor = float(match[2] or to)
        if match[2] and CHOICES[match[1]](factor, length) == CHOICES[match[1]](factor + 8, length):
            raise EvaluationError(f"{place} {name}: {match[1]} has no factor; leave out :{match[2]}")
        shown = f"{match[1]}:{factor:g}" if match[2] else name
        found[shown] = Method(shown, tuple(CHOICES[match[1]](factor, length)))
    return list(found.values())


def trial_methods(names: Sequence[str], place: str = "--finetune-method") -> list[str]:
    """Return the names of the methods to train, the control first. Raises EvaluationError for an unknown name.

    `place` names the option or file in messages.
    """
    for name in names:
        if name not in FINETUNED:
            raise EvaluationError(f"{place} {name}: unknown method; name some of {', '.join(FINETUNED)}")
    return list(dict.fromkeys((CONTROL, *names)))


def trial_keys(method: str, factor: float, length: int, lora: str | None = None, latent: bool = False) -> list[str]:
    """Return the config overrides of a method of `--finetune-method`.

    `lora` is the value of the config key `lora`, or None without adapters. A method with stages trains adapters in its
    last stage only, because the earlier stages train whole matrices. `latent` is True if the model has latent
    attention.
    """
    if method == "coca_stages":
        *first, last = LATENT_STAGES if latent else STAGES
        last = last if lora is None else f"{last.removesuffix('}')}, lora: {lora}}}"
        return ["pos_emb=coca", f"stages=[{', '.join((*first, last))}]"]
    return [*FINETUNED[method](factor, length), *([] if lora is None else [f"lora={lora}"])]


def simplicity(name: str) -> tuple[int, int, int]:
    """Return a sort key for the simplicity of a method. The simplest method has the smallest key.

    The plain model comes first, and fine-tuned models come last. Other methods are ordered by the number of config keys
    that they set, and methods with equal numbers by their order in CHOICES.
    """
    kind, _, factor = name.removesuffix(TRAINED).partition(":")
    table, trained = (FINETUNED, True) if name.endswith(TRAINED) else (CHOICES, False)
    return trained + (name != PLAIN), len(table[kind](float(factor or 2), 1)), list(table).index(kind)


def multiples_up_to(to: float) -> list[float]:
    """Return the multiples of the training length that are measured: the powers of 2 up to `to`, and `to` itself."""
    powers = [2.0**power for power in range(int(math.log2(to)) + 1)]
    return sorted({*powers, float(to)})
