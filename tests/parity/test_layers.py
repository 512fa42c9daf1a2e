"""Whole attention layers of every map, extension, norm, temperature and sink against the float64 oracle, and those of
gpt-oss and Llama 4 against transformers.
"""

import pytest
import torch

from tests.parity.layer_oracle import layer_of, oracle_error
from tests.parity.stock_layers import gpt_oss, llama4
from tools.bench_methods import METHODS

LENGTH = 300  # beyond the window and the chunk
ALLOWED = {"clex": 1e-5} | dict.fromkeys(("kerple_log", "kerple_power", "rpe", "fire"), 1e-7)
"""The frequencies of CLEX solve an equation; a step of 0.1 changes them by 1e-8 and phases by more. Learned biases are
computed in float32."""


@pytest.mark.parametrize("name", METHODS)
def test_a_layer_is_that_of_the_oracle(name: str) -> None:
    assert oracle_error(METHODS[name], LENGTH, torch.float64) < ALLOWED.get(name, 1e-12)


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"rotary", "gau"}))
def test_no_row_is_rotary_under_another_name(name: str) -> None:
    hidden = torch.randn(1, LENGTH, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (layer, _), (rotary, _) = (layer_of(keys, torch.float64, LENGTH // 4) for keys in (METHODS[name], {}))
    rotary.load_state_dict(layer.state_dict(), strict=False)
    torch.manual_seed(0)
    assert float((layer(hidden) - rotary(hidden)).norm() / rotary(hidden).norm()) > 1e-4


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("length", [1, 29])
def test_layers_of_llama4(length: int, rotates: bool) -> None:
    """Chunks of neighbouring pairs, which transformers rotates in float32; and its temperature, float32 too."""
    ours, theirs = llama4(length, rotates, torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("window", [None, 7])
def test_layers_of_gpt_oss(window: int | None) -> None:
    ours, theirs = gpt_oss(29, window, torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
