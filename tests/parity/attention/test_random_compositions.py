"""Random compositions against the float64 oracle: form, frequencies, extension, map, scaling, layout and backend are
drawn.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from test_attention_extensions import EXTENSIONS

from megatron_coca.config import ConfigError
from tests.parity.attention_cases import (
    _MAPS,
    BACKENDS,
    BIASED,
    HEADS,
    ROTATED,
    Case,
    Layout,
    error,
    exact,
    production,
    served,
    with_window,
)

DRAWS, MORE_DRAWS = 30, 1000
POLAR = {
    "power": (1, 2),
    "frequencies": ("feature", "pair"),
    "magnitude": ("softplus", "relu_mean"),
    "offset": ("none", "uniform", "free"),
}
SCALINGS = ("none", "none", "log_n", "log_n_trained", {"type": "temperature", "period": 16, "strength": 0.4})


def pick(draw: random.Random, choices: Sequence, chance: float):
    """One of the choices with that chance, otherwise None."""
    return draw.choice([*choices]) if draw.random() < chance else None


def drawn_case(draw: random.Random) -> Case:
    """A method; what has no meaning together is drawn again."""
    while True:
        form = draw.choice([*ROTATED, *ROTATED, "xpos", "polar", "polar", "none", *BIASED])
        rotates = form in (*ROTATED, "xpos", "polar")
        extension = (rotates and pick(draw, [*EXTENSIONS.values()], 0.6)) or {}
        relative = pick(draw, [each for each in _MAPS.values() if each["type"] != "inv_leaky_rerope"], 0.4) or {}
        case = Case(form, extension, relative, draw.choice(SCALINGS), draw.choice((1.0, 1.0, 0.5)))
        if rotates and draw.random() < 0.25:
            case = replace(case, rope_id=draw.choice(({}, {"turns": 1.0, "period": 3.0})))
        if form == "polar":
            case = replace(case, options={name: draw.choice(values) for name, values in POLAR.items()})
        if relative:
            case = with_window(case, draw.choice((5, 8, 21, 40)))
        try:
            case.method.needs("cpu", 0.0)
        except (ConfigError, ValueError):
            continue
        return case


def drawn_layout(draw: random.Random) -> Layout:
    """Lengths around the training length of 32 and far beyond it; key heads, late queries and documents."""
    length = draw.choice((1, 2, 7, 31, 32, 33, 64, 97, 130))
    batch = draw.choice((1, 2))
    ids = None
    if draw.random() < 0.3 and length > 2:
        ids = tuple(tuple(accumulate(draw.random() < 0.2 for _ in range(length))) for _ in range(batch))
    queries = draw.randrange(1, length) if length > 2 and draw.random() < 0.3 else None
    return Layout(length, queries, draw.choice((1, 2, HEADS)), batch, None, ids)


def check_draw(seed: int) -> None:
    """One drawn composition through one of the backends that serve it, in float64."""
    draw = random.Random(seed)
    case, layout = drawn_case(draw), drawn_layout(draw)
    backend = draw.choice([name for name in BACKENDS if name != "flex" and served(name, case)])
    what = f"seed {seed}: {case}, {layout}, {backend}"
    true = exact(case, layout, torch.float64).all
    ours = production(case, layout, torch.float64, BACKENDS[backend].attend).all
    for name, expected in true.items():
        allowed = 1e-10 if name in ("out", "q", "k", "v") else 1e-6  # learned weights are float32
        assert error(ours[name], expected) < allowed, f"{what}: {name}"


def test_drawn_compositions() -> None:
    for seed in range(DRAWS):
        check_draw(seed)


@pytest.mark.slow
def test_many_drawn_compositions() -> None:
    for seed in range(DRAWS, DRAWS + MORE_DRAWS):
        check_draw(seed)
