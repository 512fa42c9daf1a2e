"""The methods that `megatron-coca stretch` compares: those that need no training, and those that it trains."""

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_coca.evaluation.results import EvaluationError

PLAIN = "plain"
MOST = 1024
"""The greatest value of `--to`, which is the longest input as a multiple of the training length."""

Changes = Callable[[float, int], list[str]]
"""A function (factor, training length) -> config overrides."""


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
        f"relative_positions.group_size={max(2, 2 * math.ceil(factor))}",  # half of the training length is the window
    ],
    "dual_chunk": _map("dual_chunk"),
    "lm_infinite": _map("lm_infinite"),
}
"""The config overrides of each method. The factor is the number after the colon, or else that of --to."""

CONTROL = "none"
"""The fine-tuning that changes no config key. It trains on the same tokens, and at the same learning rate, as the
others."""


def _original(kind: str) -> Changes:
    """Return the changes for an extension whose model is trained further, possibly at another length."""
    return lambda factor, length: [
        *_extension(kind)(factor, length),
        f"rope_scaling.original_max_position_embeddings={length}",
    ]


STAGES = (
    "{until: 33%, trainable: [key]}",
    "{until: 67%, trainable: [query, key, value], reset_optimizer: true}",
    "{reset_optimizer: true}",
)
"""The stages of the CoCA paper: the T projection, which replaces K, then Q, T and V, then everything."""
LATENT_STAGES = ("{until: 33%, trainable: [key, value]}", *STAGES[1:])
"""The stages for latent attention, in which one matrix computes T and the values."""
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
"""The config keys of each method of `--finetune-method`, for the factor of `--to`."""
TRAINED = " (trained)"
"""The end of the name of a fine-tuned model on a page."""
MOST_LENGTH = 2048
"""Length of the training samples, unless the model was trained on shorter ones or `--finetune-length` is given."""
OWN_WEIGHTS = ("pope",)
"""The methods of `--finetune-method` that add weights to the model. With `--lora` they are trained as a whole."""
LORA = "{{rank: 16, alpha: 32, also: [{also}]}}"
"""The value of the config key `lora` with `--lora`. `also` names the parts that are trained as a whole."""
RATE, LORA_RATE = "2e-5", "2e-4"
"""The learning rates of a trial: the rate of position interpolation in the CoCA paper and, for adapters, that of
QLoRA."""

DEFAULT = (PLAIN, "dynamic:2", "yarn", "rerope", "rerope+log_n", "self_extend", "dual_chunk", "lm_infinite")
_NAME = re.compile(r"([a-z_+]+)(?::(\d+(?:\.\d+)?))?")


class Method(NamedTuple):
    """A compared method: its name in tables, and the config overrides that select it."""

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
    """Return the methods to train, the control first. Raises EvaluationError for an unknown name.

    `place` names the option or file in messages.
    """
    for name in names:
        if name not in FINETUNED:
            raise EvaluationError(f"{place} {name}: unknown method; name some of {', '.join(FINETUNED)}")
    return list(dict.fromkeys((CONTROL, *names)))


def trial_keys(method: str, factor: float, length: int, lora: str | None = None, latent: bool = False) -> list[str]:
    """Return the config keys of a method of `--finetune-method`.

    `lora` is the value of the config key with this name, or None without adapters. A method with stages trains adapters
    in its last stage only, because the earlier ones train whole matrices. `latent` says whether the model has latent
    attention.
    """
    if method == "coca_stages":
        *first, last = LATENT_STAGES if latent else STAGES
        last = last if lora is None else f"{last.removesuffix('}')}, lora: {lora}}}"
        return ["pos_emb=coca", f"stages=[{', '.join((*first, last))}]"]
    return [*FINETUNED[method](factor, length), *([] if lora is None else [f"lora={lora}"])]


def simplicity(name: str) -> tuple[int, int, int]:
    """Return the place of a method in the order of simplicity; the smallest is the simplest.

    The plain model comes first, then methods are ordered by the number of config keys that they set, then by CHOICES.
    Fine-tuned models come last.
    """
    kind, _, factor = name.removesuffix(TRAINED).partition(":")
    table, trained = (FINETUNED, True) if name.endswith(TRAINED) else (CHOICES, False)
    return trained + (name != PLAIN), len(table[kind](float(factor or 2), 1)), list(table).index(kind)


def multiples_up_to(to: float) -> list[float]:
    """Return 1, 2, 4, .. and `to`, the multiples of the training length that are measured."""
    powers = [2.0**power for power in range(int(math.log2(to)) + 1)]
    return sorted({*powers, float(to)})
