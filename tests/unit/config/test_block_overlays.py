"""configs/model: the block of a family over every file of configs/350M, and the warning of a narrow gated layer."""

import re
from pathlib import Path

import pytest

from megatron_coca.config import load_config
from megatron_coca.model.build import empty_model
from megatron_coca.model.cost import parameter_count

ROOT = Path(__file__).parents[3] / "configs"
INNER = {"neox": 4.0} | dict.fromkeys(("llama", "qwen3", "olmo2", "gemma3"), 8 / 3)
"""Inner width of the MLP in hidden sizes, with which a gated layer has the parameters of a plain one."""


def test_every_overlay_is_listed() -> None:
    assert {path.stem for path in (ROOT / "model").iterdir()} == INNER.keys()


@pytest.mark.parametrize("method", sorted(path.stem for path in (ROOT / "350M").iterdir()))
@pytest.mark.parametrize("block", INNER)
def test_a_block_over_a_method(block: str, method: str) -> None:
    """It is built, on the meta device; positions stay, and parameters do within 0.1%."""
    plain = load_config(ROOT / f"350M/{method}.yml")
    config = load_config([ROOT / f"350M/{method}.yml", ROOT / f"model/{block}.yml"])
    assert config.position == plain.position and config.model.narrow_mlp is None
    assert 0 <= config.model.ffn_hidden_size - INNER[block] * config.model.hidden_size < 16
    share = parameter_count(config).non_embedding / parameter_count(plain).non_embedding
    assert share == pytest.approx(1, abs=1e-3)
    short = config.override(["num_layers=2"])
    weights = empty_model(short, "cpu", memory="meta").parameters()
    assert sum(weight.numel() for weight in weights) == parameter_count(short).total


NARROW = {"350M": ({}, 1365, 2736), "100M": ({"hidden_size": 768, "num_attention_heads": 12}, 1024, 2048)}


@pytest.mark.parametrize("size", NARROW)
def test_a_narrow_gated_layer_is_warned_of_with_its_width(size: str) -> None:
    keys, narrow, wide = NARROW[size]
    config = load_config(ROOT / "350M/roformer.yml", keys | {"activation": "swiglu"})
    said = rf"inner width is {narrow}, .*expansion_factor=8 with mlp_multiple_of=8"
    assert re.search(said, str(config.model.narrow_mlp))
    mended = config.override(["expansion_factor=8", "mlp_multiple_of=8"]).model
    assert mended.narrow_mlp is None and mended.ffn_hidden_size == wide
