"""The three functions that other programs import, on a trained run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca import build_model, load_config, load_model
from megatron_coca.checkpoints import CheckpointError
from megatron_coca.config import ConfigError
from megatron_coca.model import LanguageModelLoss

TRAINED = 32
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}


def tokens(length: int) -> Tensor:
    return torch.randint(32, 127, (2, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_a_trained_run_is_loaded_and_has_learnt(whole: Any, small: dict[str, Any]) -> None:
    config = load_config([], small)
    trained, fresh = load_model(whole.folder), build_model(config).eval()
    assert not trained.training
    text = torch.tensor([list(b"the sea was calm and a small boat")])
    assert LanguageModelLoss(trained)(text) < LanguageModelLoss(fresh)(text) - 0.3
    assert torch.equal(load_model(str(whole.folder / "global_step12"))(text), trained(text))


@torch.no_grad()
def test_four_times_the_training_length(whole: Any) -> None:
    plain, extended = load_model(whole.folder), load_model(whole.folder, DYNAMIC)
    short, long = tokens(TRAINED), tokens(4 * TRAINED)
    assert torch.equal(plain(short), extended(short)), "dynamic scaling begins beyond the training length"
    logits = extended(long)
    assert logits.shape == (2, 4 * TRAINED, 512) and torch.isfinite(logits).all()
    assert float((logits - plain(long)).abs().max()) > 1e-5
    assert extended.methods["global"].rotary.original_length == TRAINED


@torch.no_grad()
def test_overrides_as_texts_and_as_a_mapping_are_alike(whole: Any) -> None:
    texts = ["rope_scaling.rope_type=dynamic", "rope_scaling.factor=4.0", "attention_backend=reference"]
    mapping = DYNAMIC | {"attention_backend": "reference"}
    by_text, by_mapping = load_model(whole.folder, texts), load_model(whole.folder, mapping)
    assert torch.equal(by_text(tokens(100)), by_mapping(tokens(100)))
    torch.testing.assert_close(
        by_text(tokens(100)), load_model(whole.folder, DYNAMIC)(tokens(100)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("key", ["num_layers=3", "pos_emb=rotary", "rotary_pct=1.0", "vocab_size=600", "seq_length=16"])
def test_overrides_that_make_another_model_are_errors(whole: Any, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"cannot be evaluated with another .*{key.partition('=')[0]}"):
        load_model(whole.folder, [key])


def test_overrides_that_are_not_valid(whole: Any) -> None:
    with pytest.raises(ConfigError, match="rope_scalin.*rope_scaling"):
        load_model(whole.folder, {"rope_scalin": {}})
    with pytest.raises(ConfigError, match="rope_type"):
        load_model(whole.folder, ["rope_scaling.rope_type=dynamical", "rope_scaling.factor=2"])


def test_files_merge_from_left_to_right_and_then_overrides(tmp_path: Path) -> None:
    (tmp_path / "model.yml").write_text(
        "num-layers: 2\nhidden_size: 32\nnum_attention_heads: 2\nseq_length: 16\nvocab_size: 64\npos_emb: rotary\n"
    )
    (tmp_path / "more.yml").write_text("num_layers: 3\nseed: 5\n")
    config = load_config([tmp_path / "model.yml", tmp_path / "more.yml"], ["seed=9", "pos_emb=coca"])
    assert (config.model.num_layers, config.seed, config.position.pos_emb) == (3, 9, "coca")
    model = build_model(config)
    assert len(model.blocks) == 3 and model.training
    assert model(tokens(8) % 64).shape == (2, 8, 128)


def test_a_model_needs_a_vocabulary() -> None:
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16}
    with pytest.raises(ConfigError, match="vocab_size: not set"):
        build_model(load_config([], shape))
