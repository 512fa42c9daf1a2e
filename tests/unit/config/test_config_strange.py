"""Strange values of every key: each is accepted, or its error names the key. Files with strange contents."""

import math
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.config.neox_keys import ALIASES
from megatron_coca.config.schedule import learning_rate
from megatron_coca.config.schema import KEYS, SECTIONS, nested_names

SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "seq_length": 64,
    "pos_emb": "rotary",
    "train_iters": 10,
    "optimizer.params.lr": 1e-3,
}
NAMES = [*KEYS, *ALIASES, *SECTIONS, *(f"{key}.{name}" for key in KEYS for name in nested_names(key))]
PASSED_ON = [f"{key}.{name}" for key in ("zero_optimization", "deepspeed_extra_args") for name in ("stage", "other")]
STRANGE: dict[str, Any] = {
    "zero": 0,
    "negative": -1,
    "int64": 2**63 - 1,
    "largest float": 1e308,
    "smallest float": 5e-324,
    "negative float": -1e308,
    "nan": math.nan,
    "inf": math.inf,
    "bool": True,
    "empty": "",
    "word": "maybe",
    "empty list": [],
    "list": [None, -1, {"a": [1e308]}],
    "empty mapping": {},
    "mapping": {"a": {"b": None}},
}


def use(config: Config) -> None:
    """Read what the rest of the package derives from a configuration alone."""
    assert load_config([], dict(config.flat())).flat() == config.flat()
    assert config.model.head_dim >= 1 and config.model.ffn_hidden_size >= 1
    if config.model.vocab_size is not None:
        assert config.model.padded_vocab_size < 2**31 + 2**20
    assert math.isfinite(learning_rate(5, config.optimizer.lr or 1.0, config.schedule))
    assert config.parallel.stage in (0, 1, 2, 3)
    config.to_yaml().encode()


@pytest.mark.fewest
@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE)
def test_a_strange_value_is_accepted_or_its_error_names_the_key(strange: Any) -> None:
    for name in [*NAMES, *PASSED_ON]:
        try:
            use(load_config([], SHAPE | {name: strange}))
        except ConfigError as error:
            text, key = str(error), ALIASES.get(name, name)
            owner = key if key in KEYS else key.partition(".")[0]
            assert name in text or owner in text, f"{name}: {text[:500]}"
            assert len(text) < 5000, f"{name}: {len(text)} characters"


LARGEST = {"expansion_factor": 1024.0, "num_layers": 2**14, "num_workers": 1024, "watchdog_timeout": 1e9}


@pytest.mark.parametrize(("key", "value"), LARGEST.items())
def test_the_end_of_a_range_is_named(key: str, value: float) -> None:
    use(load_config([], SHAPE | {key: value}))
    with pytest.raises(
        ConfigError, match=f"^overrides: {key}: expected a value less than or equal to {value:.0f}, got"
    ):
        load_config([], SHAPE | {key: value + 1 if isinstance(value, int) else value * 2})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("torch_compile", "expected true or false or `auto`, got 'maybe'"),
        ("loss_chunk_size", "expected an integer or `auto`, got 'maybe'"),
        ("num_layers", "expected an integer, got 'maybe'"),
    ],
)
def test_a_union_of_types_is_an_error_once(key: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([], SHAPE | {key: "maybe"})
    assert error.value.problems == [f"overrides: {key}: {message}"]


def test_an_empty_path_is_an_error() -> None:
    with pytest.raises(ConfigError, match="save: expected a path, got ''"):
        load_config([], SHAPE | {"save": ""})


def test_a_loop_of_links_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    load_config([], SHAPE | {"save": str(tmp_path / "a")})


@pytest.mark.parametrize(
    "text",
    [
        "optimizer.params.lr: 1.0\noptimizer: {params: {lr: 2.0}}",
        "optimizer:\n  params.lr: 1.0\n  params: {lr: 2.0}",
        "zero_optimization.stage: 1\nzero_optimization: {stage: 2}",
        "optimizer: {params: {lr: 1.0, lr: 2.0}}",
        "deepspeed_extra_args: {a: [{b: 1, b: 2}]}",
    ],
)
def test_a_key_given_twice_is_an_error_at_every_depth(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yml"
    path.write_text(text)
    shape = {key: value for key, value in SHAPE.items() if "." not in key}
    with pytest.raises(ConfigError, match="(lr|stage|b): given twice, on lines"):
        load_config(path, shape)


def test_a_merged_mapping_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text("fp16: &half {enabled: false, hysteresis: 2}\nbf16: {enabled: true}\n")
    load_config(path, SHAPE)
    path.write_text(
        "deepspeed_extra_args:\n  a: &a {b: {c: 1}, d: 2}\n  e: {<<: *a, b: {c: 3}}\noptimizer.params.lr: 1.0\n"
        "optimizer: {params: {betas: [0.9, 0.95]}}\n"
    )
    config = load_config(path, {key: value for key, value in SHAPE.items() if "." not in key})
    assert config.parallel.deepspeed_extra_args == {"a": {"b": {"c": 1}, "d": 2}, "e": {"b": {"c": 3}, "d": 2}}
    assert (config.optimizer.lr, config.optimizer.betas) == (1.0, (0.9, 0.95))


@pytest.mark.parametrize("name", ["a\0.yml", "a\ud800.yml", "x" * 5000 + ".yml"])
def test_a_name_of_a_file_that_cannot_exist(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: "):
        load_config(name)
