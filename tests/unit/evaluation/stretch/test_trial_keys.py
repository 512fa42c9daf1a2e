"""The config keys of trials of fine-tuning: every method of `stretch` trains, with and without adapters."""

from argparse import Namespace
from pathlib import Path

import pytest

from megatron_coca.checkpoints import open_checkpoint
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.importing import starting_config
from megatron_coca.config import load_config
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.stretch.choices import FINETUNED
from megatron_coca.evaluation.stretch.finetuning import check, keys_of
from megatron_coca.training.adapters import add_adapters
from megatron_coca.training.checkpointing.initial_model import initial_model
from megatron_coca.training.optimizer import train_only_parts
from tests.checkpoint_files import write_checkpoint

LENGTH = 64
SHAPE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": LENGTH, "vocab_size": 512}
SHAPE |= {"pos_emb": "rotary", "norm": "rmsnorm", "activation": "swiglu", "tokenizer_type": "CharLevelTokenizer"}
SHAPE |= {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False, "gpt_j_residual": False}
MODELS = {
    "dense": {},
    "norms without weights": {"norm": "non_parametric_layernorm", "no_weight_tying": True},
    "mixture": {"moe_num_experts": 4, "moe_top_k": 2},
    "latents": {"kv_lora_rank": 12, "qk_rope_head_dim": 8},
}
"""Config keys of small models."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the models for transformers."""
    folders = {}
    for name, keys in MODELS.items():
        place = tmp_path_factory.mktemp("model")
        folders[name] = export(write_checkpoint(place / "run", load_config([], SHAPE | keys)), place / "folder").folder
    return folders


def options(model: Path, lora: bool = False, given: tuple[str, ...] = ()) -> Namespace:
    """The options of a trial that `check` and `keys_of` read."""
    named = {"model": str(model), "to": 2.0, "lora": lora, "finetune": 10, "finetune_length": None}
    return Namespace(**named, finetune_set=given, finetune_data=["texts"], data=None)


def trained(model: Path, method: str, lora: bool = False, given: tuple[str, ...] = ()) -> set[str]:
    """Start the training of a method as `megatron-coca train` does, and return the names of the trained weights."""
    keys = keys_of(options(model, lora, given), method, open_checkpoint(model, verify=False).trained.model)
    config = starting_config(model, ["train_iters=10", *keys])
    config = config.run_stages()[-1].config if config.schedule.stages else config
    module = initial_model(config, "cpu", None, verify=False).model
    if config.optimizer.lora is None:
        train_only_parts(module, config.optimizer)
    else:
        add_adapters(module, config.optimizer.lora, 0)
    return {name for name, weight in module.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("method", FINETUNED)
@pytest.mark.parametrize("model", MODELS)
def test_every_method_trains_every_model(models: dict[str, Path], model: str, method: str, lora: bool) -> None:
    check(options(models[model], lora), [method])
    names = trained(models[model], method, lora)
    assert not [name for name in names if "router" in name]
    assert any("lora_A" in name for name in names) == lora
    assert bool([name for name in names if "position_offsets" in name]) == (method == "pope")
    whole = {name for name in names if "lora" not in name and "position" not in name}
    assert not lora or all("norm" in name for name in whole)
    assert lora or whole, "all other weights are trained"


def test_trained_parts_of_the_user_are_kept(models: dict[str, Path]) -> None:
    names = trained(models["mixture"], "pi", given=("trainable=[router]",))
    assert names and all("router" in name for name in names)
    lora = "lora={rank: 2, also: [router]}"
    assert {
        "lora_A" in name or "router" in name or "lora_B" in name
        for name in trained(models["mixture"], "pi", given=(lora,))
    } == {True}


def test_a_method_that_cannot_be_trained_is_named_first(models: dict[str, Path]) -> None:
    with pytest.raises(EvaluationError, match="--finetune-method pi: .*hidden_dropout: .*2"):
        check(options(models["dense"], given=("hidden_dropout=2",)), ["none", "pi"][1:])
