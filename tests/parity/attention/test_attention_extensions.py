"""Frequency extensions, by themselves and combined with maps and logit scaling, against the oracle, within the training
length of 32 and beyond it.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_coca.data import DrawnPositions
from tests.parity.attention_cases import (
    BACKENDS,
    ROTATED,
    TRAINING_LENGTH,
    Case,
    Layout,
    assert_as_exact_as_plain,
    error,
    exact,
    inputs_of,
    production,
)
from tests.reference.clex import clex_frequencies
from tests.reference.dense import attention

SHORT = [1.0 + 0.125 * j for j in range(8)]
LONG = [1.0 + 0.5 * j * j for j in range(8)]
EXTENSIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "ntk": {"rope_type": "ntk", "factor": 2.0},
    "ntk_fixed": {"rope_type": "ntk_fixed", "factor": 4.0},
    "ntk_mixed": {"rope_type": "ntk_mixed", "factor": 4.0},
    "ntk_mixed_b": {"rope_type": "ntk_mixed", "factor": 12.0, "b": 0.75},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "dynamic_max": {"rope_type": "dynamic_max", "target_length": 80},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn_narrow": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False},
    "yarn_rotations": {"rope_type": "yarn", "factor": 4.0, "ramp": "rotations", "beta_fast": 4.0, "beta_slow": 0.1},
    "yarn_factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.75},
    "dynamic_yarn": {"rope_type": "dynamic_yarn", "beta_fast": 3.0, "beta_slow": 0.25},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "short_factor": SHORT, "long_factor": LONG},
    "llama3": {"rope_type": "llama3", "factor": 8.0},
    "proportional": {"rope_type": "proportional", "proportion": 0.4, "factor": 2.0},
    "clex": {"rope_type": "clex", "ode_step": 0.01},
    "resonance": {"rope_type": "default", "resonance": True},
    "yarn_resonance": {"rope_type": "yarn", "factor": 4.0, "resonance": True},
}
COMBINED = {
    "coca-dynamic-rerope": Case("coca", EXTENSIONS["dynamic"], {"type": "rerope", "window": 20}),
    "coca-yarn-self_extend-log_n": Case(
        "coca", EXTENSIONS["yarn"], {"type": "self_extend", "window": 21, "group_size": 4}, "log_n", 0.5
    ),
    "coca_strict-ntk_mixed-leaky_rerope": Case(
        "coca_strict", EXTENSIONS["ntk_mixed"], {"type": "leaky_rerope", "window": 12, "leak": 4.0}
    ),
    "coca-clex-log_n": Case("coca", EXTENSIONS["clex"], logit_scaling="log_n"),
    "rotary-dynamic_yarn-streaming-log_n_trained": Case(
        "rotary", EXTENSIONS["dynamic_yarn"], {"type": "streaming", "window": 20, "sinks": 4}, "log_n_trained"
    ),
    "rotary-dynamic-string-temperature": Case(
        "rotary", EXTENSIONS["dynamic"], {"type": "string", "window": 20, "local": 5}, {"type": "temperature"}
    ),
    "coca-dynamic-dual_chunk-log_n": Case(
        "coca", EXTENSIONS["dynamic"], {"type": "dual_chunk", "chunk_size": 24, "max_position": 31}, "log_n", 0.5
    ),
    "coca-temperature": Case(
        "coca", logit_scaling={"type": "temperature", "period": 16, "first": 1, "strength": 0.4}, rotary_pct=0.5
    ),
    "rotary-longrope-lm_infinite": Case(
        "rotary", EXTENSIONS["longrope"], {"type": "lm_infinite", "window": 20, "sinks": 3}, "log_n"
    ),
}
IDENTIFIED = {
    f"{ROTATED[number % 3]}-rope_id-{name}": Case(ROTATED[number % 3], scaling, rotary_pct=0.5, rope_id={"period": 4.0})
    for number, (name, scaling) in enumerate(
        (name, scaling | ({"short_factor": SHORT[:4], "long_factor": LONG[:4]} if name == "longrope" else {}))
        for name, scaling in EXTENSIONS.items()
        if name not in ("proportional", "clex")
    )
} | {
    "coca-rope_id": Case("coca", rope_id={}),
    "coca-rope_id-ntk-rerope-log_n": Case(
        "coca", EXTENSIONS["ntk"], {"type": "rerope", "window": 20}, "log_n", 0.5, rope_id={"period": 3.0}
    ),
    "xpos-rope_id": Case("xpos", rope_id={"turns": 4.0}),
}
"""Frequencies of RoPE-ID, with every extension of them."""
ALL = {f"{form}-{name}": Case(form, scaling) for name, scaling in EXTENSIONS.items() for form in ROTATED}
ALL |= COMBINED | IDENTIFIED

EXTENDED = [(name, 100) for name in ALL] + [
    (name, length)
    for name in ALL
    if name.startswith("coca-") or name in COMBINED
    for length in (20, TRAINING_LENGTH, TRAINING_LENGTH + 1)
]


@pytest.mark.pairs("name", "name")
@pytest.mark.parametrize(("name", "length"), EXTENDED)
def test_extensions(name: str, length: int) -> None:
    """Values and gradients, those of CLEX's network included."""
    case, layout = ALL[name], Layout(length)
    ours = production(case, layout, torch.float64, BACKENDS["reference"].attend).all
    for what, expected in exact(case, layout, torch.float64).all.items():
        limit = 1e-10 if what in ("out", "q", "k", "v") else 1e-6  # the network's gradients are float32
        assert error(ours[what], expected) < limit, what


@pytest.mark.parametrize("name", COMBINED)
def test_combinations_through_merge(name: str) -> None:
    case, layout = COMBINED[name], Layout(100)
    ours = production(case, layout, torch.float32, BACKENDS["merge"].attend)
    assert_as_exact_as_plain(case, layout, torch.float32, ours)


def test_every_extension_changes_what_it_should() -> None:
    """Beyond L all differ from plain rotation; within L the dynamic ones do not."""
    plain = {length: exact(Case("rotary"), Layout(length), torch.float64).out for length in (20, 100)}
    within = {"dynamic", "dynamic_yarn", "clex", "default"}
    for name, scaling in EXTENSIONS.items():
        for length, same in ((20, name in within), (100, name == "default")):
            found = exact(Case("rotary", scaling), Layout(length), torch.float64).out
            assert (error(found, plain[length]) < 1e-6) == same, (name, length)


@pytest.mark.parametrize("form", ROTATED)
def test_clex_in_training(form: str) -> None:
    """The extension of the positions that training draws, with the gradients of the network."""
    drawn = DrawnPositions("stretched", 160, 0).draw(np.arange(2), 40, step=2)
    t, positions = int(drawn.max() + 1) // 40, torch.from_numpy(drawn)
    assert t == 4, "the draw is an extension"
    layout = Layout(40, positions=tuple(map(tuple, drawn.tolist())))
    case = Case(form, EXTENSIONS["clex"] | {"max_factor": 4}, training=True)

    leaves = [x.requires_grad_() for x in layout.operands(torch.float64)]
    weights: dict[str, torch.Tensor] = {}
    out = BACKENDS["reference"].attend(inputs_of(case, layout, leaves, weights))
    learned = {name: value.requires_grad_() for name, value in case.learned().items()}
    theta = clex_frequencies(learned["up"], learned["down"], t, step=0.004)
    true_leaves = [x.detach().clone().requires_grad_() for x in leaves]
    true = attention(form, *true_leaves, theta, positions)
    assert error(out, true) < 1e-10
    found = torch.autograd.grad(out.square().sum(), [*leaves, weights["up"], weights["down"]])
    expected = torch.autograd.grad(true.square().sum(), [*true_leaves, learned["up"], learned["down"]])
    for got, wanted in zip(found, expected, strict=True):
        assert error(got.double(), wanted) < 1e-6


@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn", "ntk_mixed"])
@pytest.mark.parametrize("form", ROTATED)
def test_partial_rotary(form: str, name: str) -> None:
    """The multiplier of the logits reaches the rotated part alone."""
    case, layout = Case(form, EXTENSIONS[name], rotary_pct=0.5), Layout(60)
    ours, true = (f(case, layout, torch.float64) for f in (_reference, exact))
    assert all(error(ours.all[what], expected) < 1e-10 for what, expected in true.all.items())
    whole = exact(replace(case, rotary_pct=1.0), layout, torch.float64)
    assert error(true.out, whole.out) > 1e-3


def _reference(case: Case, layout: Layout, dtype: torch.dtype):
    return production(case, layout, dtype, BACKENDS["reference"].attend)
