"""Initial weights: spread by method, the same for every method of positions, and no trace in the global random
state.
"""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_coca.config import load_config
from megatron_coca.model import GPT, build_model
from megatron_coca.model.build import INITIALIZERS, OUTPUT_LAYERS

HIDDEN, LAYERS = 128, 3
SHAPE = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 512}

STANDARD_DEVIATIONS = {
    "normal": 0.03,
    "scaled_normal": 0.03 / math.sqrt(2 * LAYERS),
    "single_residual_scaled_normal": 0.03 / math.sqrt(LAYERS),
    "small_init": math.sqrt(2 / (5 * HIDDEN)),
    "wang_init": 2 / (LAYERS * math.sqrt(HIDDEN)),
}
XAVIER = ("xavier_uniform", "xavier_normal")
ORTHOGONAL = {"orthogonal": 1.0, "scaled_orthogonal": 1 / math.sqrt(2 * LAYERS)}


def make(**keys: Any) -> GPT:
    return build_model(load_config([], SHAPE | {"pos_emb": "rotary", "init_method_std": 0.03} | keys))


def matrices(model: GPT) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.dim() == 2}


def test_every_method_is_checked_here() -> None:
    assert INITIALIZERS.keys() == {*STANDARD_DEVIATIONS, *XAVIER, *ORTHOGONAL}


@pytest.mark.parametrize("method", [*STANDARD_DEVIATIONS, *XAVIER])
def test_spread(method: str) -> None:
    for name, weight in matrices(make(init_method=method, output_layer_init_method=method)).items():
        expected = STANDARD_DEVIATIONS.get(method) or math.sqrt(2 / sum(weight.shape))
        assert float(weight.std()) == pytest.approx(expected, rel=0.04), name
        assert abs(float(weight.mean())) < 0.03 * expected, name
        bounded = float(weight.abs().max()) <= math.sqrt(3) * expected * 1.001
        assert bounded == (method == "xavier_uniform"), name


@pytest.mark.parametrize("method", ORTHOGONAL)
def test_orthogonal(method: str) -> None:
    gain = ORTHOGONAL[method]
    for name, weight in matrices(make(init_method=method, output_layer_init_method=method)).items():
        short = weight if weight.shape[0] <= weight.shape[1] else weight.T
        torch.testing.assert_close(short @ short.T, gain**2 * torch.eye(len(short)), rtol=0, atol=1e-5, msg=name)


def test_output_layers_have_their_own_method() -> None:
    weights = matrices(make(init_method="small_init", output_layer_init_method="wang_init"))
    output = [name for name in weights if name.endswith(OUTPUT_LAYERS)]
    assert len(output) == 2 * LAYERS
    for name, weight in weights.items():
        expected = STANDARD_DEVIATIONS["wang_init" if name in output else "small_init"]
        assert float(weight.std()) == pytest.approx(expected, rel=0.04), name


def test_biases_are_0_and_norms_1() -> None:
    for name, parameter in make().named_parameters():
        if parameter.dim() == 1:
            expected = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            assert (parameter == expected).all(), name


@pytest.mark.parametrize("other", ["coca", "coca_strict", "alibi", "none"])
def test_position_methods_start_from_the_same_weights(other: str) -> None:
    rotary, changed = make().state_dict(), make(pos_emb=other).state_dict()
    assert rotary.keys() == changed.keys()
    assert all(torch.equal(rotary[name], changed[name]) for name in rotary)


@pytest.mark.parametrize("kind", ["head", "feature"])
def test_output_gates_change_no_other_weight(kind: str) -> None:
    plain, gated = (make(pos_emb="kerple_log", **keys).state_dict() for keys in ({}, {"attention_output_gate": kind}))
    assert all(torch.equal(gated[name], plain[name]) for name in plain)
    added = {name: weight for name, weight in gated.items() if name not in plain}
    assert len(added) == 2 * LAYERS
    for name, weight in added.items():
        assert name.endswith("bias") or abs(float(weight.std()) - 0.03) < 0.004
        assert not name.endswith("bias") or not weight.any()


def test_seed_decides() -> None:
    first, again, other = (matrices(make(seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_global_random_state_is_left_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    make()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


@pytest.mark.parametrize("init_method", INITIALIZERS)
@torch.no_grad()
def test_the_first_loss_is_that_of_guessing(init_method: str) -> None:
    model = make(init_method=init_method)
    ids = torch.randint(512, (4, 17), generator=torch.Generator().manual_seed(0))
    loss = model.loss(model.hidden_states(ids[:, :-1]), ids[:, 1:])
    assert abs(float(loss) - math.log(512)) < 1.0
