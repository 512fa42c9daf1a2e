"""Build the position method and the attention backend of a configuration."""

import logging
from collections.abc import Callable, Iterable

from megatron_coca.attention.backends.flash import FlashBackend
from megatron_coca.attention.backends.flex import FlexBackend
from megatron_coca.attention.backends.merge import MergeBackend
from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.backends.sdpa import SdpaBackend
from megatron_coca.attention.backends.triton import TritonBackend
from megatron_coca.attention.inputs import Backend, BackendError, Needs
from megatron_coca.attention.method import BiasSource, PositionMethod, operand_maker
from megatron_coca.attention.positions.bias import (
    AlibiBias,
    LearnedBuckets,
    LearnedKerpleLog,
    LearnedKerplePower,
    alibi_slopes,
)
from megatron_coca.attention.positions.clex import Clex
from megatron_coca.attention.positions.distance_maps import DISTANCE_MAPS, TRAINING_ONLY, UNMAPPED, Band, MapSettings
from megatron_coca.attention.positions.forms import LOGIT_SCALINGS, SCORE_FORMS
from megatron_coca.attention.positions.frequencies import Rotary, Scaling
from megatron_coca.config import ModelConfig, PositionConfig

LEARNED_MODULES = (LearnedBuckets, LearnedKerpleLog, LearnedKerplePower, Clex)
"""Learned modules of position methods; each initialises its own parameters."""

BiasChoice = Callable[[PositionConfig, ModelConfig], BiasSource]


def _alibi(position: PositionConfig, model: ModelConfig) -> BiasSource:
    return BiasSource("linear", fixed=AlibiBias(alibi_slopes(model.num_attention_heads)))


def _kerple_log(position: PositionConfig, model: ModelConfig) -> BiasSource:
    return BiasSource("log", by_layer=lambda: LearnedKerpleLog(model.num_attention_heads))


def _kerple_power(position: PositionConfig, model: ModelConfig) -> BiasSource:
    return BiasSource("power", by_layer=lambda: LearnedKerplePower(model.num_attention_heads))


def _buckets(position: PositionConfig, model: ModelConfig) -> BiasSource:
    buckets, furthest = position.rpe_num_buckets, position.rpe_max_distance
    return BiasSource(
        "buckets", shared=lambda: LearnedBuckets(model.num_attention_heads, model.head_dim, buckets, furthest)
    )


BIASES: dict[str, BiasChoice] = {
    "alibi": _alibi,
    "kerple_log": _kerple_log,
    "kerple_power": _kerple_power,
    "rpe": _buckets,
}
"""GPT-NeoX learns one T5 table for all layers; KERPLE's authors learn a kernel for each."""


def build_method(position: PositionConfig, model: ModelConfig) -> PositionMethod:
    """The method that the configuration names, for the model's head shape and training length."""
    form, bands = SCORE_FORMS[position.pos_emb], _bands(position, model.seq_length)
    evaluated = position.relative_positions is None or position.relative_positions.type not in TRAINING_ONLY
    return PositionMethod(
        name=position.pos_emb,
        form=form,
        rotary=_rotary(position, model) if form.rotary else None,
        num_heads=model.num_attention_heads,
        head_dim=model.head_dim,
        training_length=model.seq_length,
        bias=BIASES[position.pos_emb](position, model) if position.pos_emb in BIASES else BiasSource(),
        clex=_clex(position, model),
        bands=bands if evaluated else UNMAPPED,
        trained_bands=bands,
        logit_scaling=LOGIT_SCALINGS[position.logit_scaling],
        decay=position.pos_emb == "xpos",
        operands=operand_maker(position.operand_kernel),
    )


def _rotary_dim(position: PositionConfig, model: ModelConfig) -> int:
    return int(model.head_dim * position.rotary_pct)


def _rotary(position: PositionConfig, model: ModelConfig) -> Rotary:
    given = position.rope_scaling
    scaling = Scaling(**given.rules()) if given is not None and given.rope_type != "clex" else Scaling()
    original = position.original_length(model.seq_length)
    return Rotary(_rotary_dim(position, model), float(position.rotary_emb_base), original, scaling)


def _clex(position: PositionConfig, model: ModelConfig) -> Callable[[], Clex] | None:
    scaling = position.rope_scaling
    if scaling is None or scaling.rope_type != "clex":
        return None
    dim, base = _rotary_dim(position, model), float(position.rotary_emb_base)
    original = position.original_length(model.seq_length)
    return lambda: Clex(dim, base, original, scaling.max_factor, scaling.ode_step)


def _bands(position: PositionConfig, training_length: int) -> tuple[Band, ...]:
    given = position.relative_positions
    if given is None:
        return UNMAPPED
    settings = MapSettings(**given.settings(training_length))
    return DISTANCE_MAPS[given.type](settings)


logger = logging.getLogger(__name__)

BACKENDS: dict[str, Backend] = {
    "sdpa": SdpaBackend(),
    "merge": MergeBackend(),
    "flash": FlashBackend(),
    "flex": FlexBackend(),
    "triton": TritonBackend(),
    "reference": ReferenceBackend(),
}
AUTOMATIC = ("sdpa", "merge", "flex")
"""Candidates of `auto` in order of preference; the others are used only by name: `flash` and `triton` because nothing
has been measured that would prefer them, `reference` because it needs O(N^2) memory.
"""


def find_backend(name: str, needs: Needs) -> tuple[str, dict[str, str]]:
    """Name of the backend for `attention_backend: name`, and the reasons against those passed over.

    Raises:
        BackendError: the named backend cannot serve `needs` (it is never replaced silently), or none of the
        automatic ones can.
    """
    candidates = AUTOMATIC if name == "auto" else (name,)
    reasons: dict[str, str] = {}
    for candidate in candidates:
        reason = BACKENDS[candidate].supports(needs)
        if reason is None:
            return candidate, reasons
        reasons[candidate] = reason
    remedy = (
        "; set attention_backend to another one or to auto"
        if name != "auto"
        else "; attention_backend: reference runs anything, slowly"
    )
    raise BackendError(f"attention_backend {name} cannot serve this model{_passed_over(reasons)}{remedy}")


def select_backend(name: str, needs: Needs) -> tuple[str, Backend]:
    """(name, backend) for `attention_backend: name`; logs a choice that is not the first one. Raises BackendError as
    `find_backend`.
    """
    chosen, reasons = find_backend(name, needs)
    if reasons:
        logger.info("attention backend %s%s", chosen, _passed_over(reasons))
    return chosen, BACKENDS[chosen]


def _passed_over(reasons: dict[str, str]) -> str:
    return "".join(f"; not {name}: {reason}" for name, reason in reasons.items())


_WINDOW = 256
_NEAR = Band(0, _WINDOW)

NEEDS: dict[str, Needs] = {
    "`pos_emb: rotary`, `coca`, `coca_strict`, `xpos`, `learned`, `sinusoidal`, `none`": Needs("cuda"),
    "`pos_emb: alibi`": Needs("cuda", bias="linear"),
    "`pos_emb: kerple_log`": Needs("cuda", bias="log"),
    "`pos_emb: kerple_power`": Needs("cuda", bias="power"),
    "`pos_emb: rpe`": Needs("cuda", bias="buckets"),
    "`relative_positions: rerope`, `leaky_rerope`, `inv_leaky_rerope`, `self_extend`": Needs(
        "cuda", bands=(_NEAR, Band(_WINDOW))
    ),
    "`relative_positions: lm_infinite`, `streaming`": Needs("cuda", bands=(_NEAR, Band(_WINDOW, None, 4))),
    "`relative_positions: streaming` with `sinks: 0`": Needs("cuda", bands=(_NEAR,)),
    "`attention_dropout` above 0, with `rotary` and its like": Needs("cuda", dropout=0.1),
    "`attention_dropout` above 0, with `alibi`": Needs("cuda", bias="linear", dropout=0.1),
    "`attention_dropout` above 0, with `rerope` and its like": Needs("cuda", bands=(_NEAR, Band(_WINDOW)), dropout=0.1),
    "heads of 60 features, with `rotary` and its like": Needs("cuda", head_dim=60),
}
"""Rows of the tables: configuration keys and the requirements they lead to."""

CPU_COLUMNS = tuple(name for name in BACKENDS if name not in ("flash", "flex", "triton"))

_INTRODUCTION = """\
# Attention backends

<!-- Written by `python -m megatron_coca.attention.build > docs/backends.md`; change the code, not this page. -->

`attention_backend` names one of these, or `auto`, which takes the first of {automatic} that serves
the model. A backend that is named and cannot serve is an error with the reason; nothing is replaced silently. A number
in a table is the reason below it.

| backend | description |
| --- | --- |
{summaries}

All of them serve grouped queries, packed documents, and queries that are the last tokens of longer keys. `flash`
computes in float16 or bfloat16 alone. `rope_scaling`, `logit_scaling` and the frequencies change the operands, not
what a backend must do, so they are in no row. `flash` and `triton` run only by name: nothing has been measured on a
GPU yet that would prefer them. They must also be installed: `pip install flash-attn`, `pip install triton`.
"""

SUMMARIES = {
    "sdpa": "PyTorch's scaled_dot_product_attention; a bias on the CPU without an N x N tensor",
    "merge": "plain flash calls whose outputs are merged by log-sum-exp; every visible pair once",
    "flash": "the flash-attn libraries, FlashAttention-3 where it can and FlashAttention-2 otherwise",
    "flex": "PyTorch's FlexAttention, compiled",
    "triton": "the kernels of megatron_coca.kernels",
    "reference": "dense, O(N^2) memory, any precision: the measure of the others",
}

Reason = Callable[[Needs], str | None]


def page() -> str:
    """The whole page as Markdown."""
    automatic = ", ".join(f"`{name}`" for name in AUTOMATIC)
    summaries = "\n".join(f"| `{name}` | {SUMMARIES[name]} |" for name in BACKENDS)
    parts = [
        _INTRODUCTION.format(automatic=automatic, summaries=summaries),
        "## On CUDA\n",
        _table("cuda", tuple(BACKENDS)),
        "## On the CPU\n\n`flash`, `flex` and `triton` train on CUDA alone.\n",
        _table("cpu", CPU_COLUMNS),
    ]
    return "\n".join(parts)


def refusal(name: str) -> Reason:
    """The `supports` of a backend, independent of the libraries installed here."""
    independent: dict[str, Reason] = {"flash": FlashBackend().refuses}
    return independent.get(name, BACKENDS[name].supports)


def _table(device_type: str, columns: tuple[str, ...]) -> str:
    """One row per entry of `NEEDS`, with numbered reasons below."""
    numbers: dict[str, int] = {}
    rows = [("needed", "auto", *columns), ("---",) * (len(columns) + 2)]
    for label, needs in NEEDS.items():
        asked = Needs(device_type, needs.head_dim, needs.bias, needs.bands, needs.dropout)
        said = {name: refusal(name)(asked) for name in columns}
        cells = [_cell(name, reason, numbers) for name, reason in said.items()]
        rows.append((label, _automatic(said), *cells))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", *_notes(numbers)]) + "\n"


def _cell(name: str, reason: str | None, numbers: dict[str, int]) -> str:
    """ "yes", or the number of the reason, new ones at the end."""
    return "yes" if reason is None else str(numbers.setdefault(f"`{name}`: {reason}", len(numbers) + 1))


def _automatic(said: dict[str, str | None]) -> str:
    return next((f"`{name}`" for name in AUTOMATIC if name in said and said[name] is None), "an error")


def _notes(numbers: dict[str, int]) -> Iterable[str]:
    return (f"{number}. {reason}" for reason, number in numbers.items())


if __name__ == "__main__":
    print(page(), end="")
