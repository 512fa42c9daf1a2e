"""The learning rate of a run that starts from a model and sets none."""

from typing import Any

import pytest

from megatron_coca.commands import train
from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.training.starting_rate import with_starting_rate

TINY = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 32, "vocab_size": 64}
START = {"load": "models/any", "finetune": True}
SMOLLM2_135M = {"num_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_kv_heads": 3}
LLAMA_7B = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
LLAMA_65B = {"num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
GATED = {"norm": "rmsnorm", "activation": "swiglu", "seq_length": 2048, "pos_emb": "rotary"}
GATED |= {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False, "use_bias_in_norms": False}


@pytest.mark.parametrize(
    ("shape", "count", "rate"),
    [
        (SMOLLM2_135M | {"intermediate_size": 3 * 1536}, "106,203,456", 1e-4),
        (LLAMA_7B | {"intermediate_size": 3 * 11008}, "6,476,271,616", 2e-5),
        (LLAMA_65B | {"intermediate_size": 3 * 22016}, "64,761,372,672", 1e-5),
    ],
    ids=["135M", "7B", "65B"],
)
def test_published_sizes(shape: dict[str, Any], count: str, rate: float) -> None:
    """The rates of Position Interpolation for 7 and 65 billion parameters. The vocabulary does not count."""
    config, note = with_starting_rate(load_config([], TINY | GATED | shape | START | {"vocab_size": None}))
    assert config.optimizer.lr == rate and config.model.vocab_size is None
    assert note is not None and f"uses {rate:g}, the default for" in note and f" {count} parameters" in note


def test_a_rate_of_the_user_wins_and_other_runs_get_none() -> None:
    given = load_config([], TINY | START | {"optimizer.params.lr": 0.25})
    assert with_starting_rate(given) == (given, None)
    mup = START | {"use_mup": True, "mup_base_hidden_size": 16}
    for keys in ({}, {"load": "runs/x"}, START | {"optimizer.type": "lion"}, START | {"optimizer.type": "sgd"}, mup):
        config = load_config([], TINY | keys)
        assert with_starting_rate(config) == (config, None), keys


def test_an_error_about_the_default_says_that_it_is_the_default() -> None:
    with pytest.raises(ConfigError, match=r"lr: not set; uses 0\.0001(.|\n)*min_lr: 0\.01 exceeds"):
        with_starting_rate(load_config([], TINY | START | {"min_lr": 0.01}))


def read(*inputs: str) -> Config:
    return train.read_config(train.parser().parse_intermixed_args(list(inputs)))[0]


def test_every_missing_key_is_named_at_once() -> None:
    shape = [f"{key}={value}" for key, value in TINY.items()]
    with pytest.raises(ConfigError) as caught:
        read(*shape)
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "train_iters",
        "optimizer.params.lr",
        "train_micro_batch_size_per_gpu",
    ]
    enough = ["train_iters=1", "train_batch_size=4", "load=a"]
    assert read(*shape, *enough, "finetune=true").optimizer.lr is None
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr: not set"):
        read(*shape, *enough, "finetune=true", "optimizer.type=lion")
