"""The key `lora`: its values, and the configurations that adapters do not support."""

from typing import Any

import pytest

from megatron_coca.config import ConfigError, load_config

SHAPE = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": 64,
    "pos_emb": "rotary",
}

EXPERTS = {"moe_num_experts": 4, "moe_expert_interval": 2}


def errors(lora: Any, **keys: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_config([], SHAPE | {"lora": lora} | keys)
    return [problem.removeprefix("overrides: ") for problem in raised.value.problems]


def test_values_and_their_order() -> None:
    lora = load_config(
        [], SHAPE | {"lora.targets": ["mlp", "query", "mlp"], "lora.also": ["norms", "key"]}
    ).optimizer.lora
    assert lora is not None
    assert (lora.targets, lora.also, lora.rank, lora.alpha) == (["query", "mlp"], ["key", "norms"], 16, 32.0)
    assert lora.settings == {"r": 16, "lora_alpha": 32, "use_rslora": False, "use_dora": False}
    assert load_config([], SHAPE | {"lora": {"alpha": 0.5}}).optimizer.lora.settings["lora_alpha"] == 0.5  # type: ignore[union-attr]
    config = load_config([], SHAPE | {"lora": {}})
    assert load_config([], config.flat() | {"metric_sinks": None}).optimizer == config.optimizer
    assert load_config([], SHAPE).optimizer.lora is None


@pytest.mark.parametrize(
    ("lora", "keys", "message"),
    [
        ({"rank": 0}, {}, "lora.rank: expected ... 1, got 0"),
        ({"targets": ["querys"]}, {}, "lora.targets[0]: `querys` ... query | key | value | dense | mlp"),
        ({"ranks": 4}, {}, "lora.ranks: unknown key ... `lora.rank`"),
        ({}, {"trainable": ["key"]}, "lora: contradicts trainable ... lora.also"),
        ({"also": ["attention_output"]}, {}, "lora: dense is in targets ... (attention_output)"),
        ({"also": ["output_head"]}, {"no_weight_tying": False}, "lora: also: output_head is tied"),
        ({"also": ["positions"]}, {}, "lora: also: this position method has no weights"),
        ({}, {"model_parallel_size": 2}, "lora: not supported with model_parallel_size 2"),
        ({}, {"pipe_parallel_size": 2}, "lora: not supported with pipe_parallel_size 2"),
        ({}, {"zero_optimization": {"stage": 3}}, "lora: not supported with ZeRO 3"),
        (
            {},
            {"attention_config": [[["gau"], "all"]], "gau_key_width": 16},
            "lora: not supported with layers of type gau",
        ),
        ({"also": ["router"]}, {}, "lora: also: no layer has experts ... no router"),
        ({"targets": ["mlp"]}, EXPERTS, "lora: peft has no adapters ... mlp from targets"),
        (
            {"also": ["router"]},
            EXPERTS | {"moe_correction_bias": True, "moe_bias_update_rate": 1e-3},
            "lora: not supported with moe_bias_update_rate",
        ),
        ({}, {"values_from_keys": True, "num_kv_heads": 2}, "lora: the values ... are its keys"),
    ],
)
def test_errors(lora: Any, keys: dict[str, Any], message: str) -> None:
    """In an expectation, " ... " stands for any words."""
    start, _, rest = message.partition(" ... ")
    first = errors(lora, **keys)[0]
    assert first.startswith(start) and rest in first[len(start) :]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_is_supported(stage: int) -> None:
    for keys in (
        {"engine": "native"} if stage < 2 else {},
        {"sequence_parallel_size": 2},
        {"context_parallel_size": 2},
        {"precision": "bfloat16"},
    ):
        load_config([], SHAPE | {"lora": {}, "zero_optimization": {"stage": stage}} | keys)
    load_config([], SHAPE | EXPERTS | {"lora": {"also": ["mlp", "router"]}})


def test_stages_can_begin_adapters_but_not_change_them() -> None:
    def staged(*stages: dict[str, Any], **keys: Any) -> str:
        given = SHAPE | {"train_iters": 9, "optimizer.params.lr": 1e-3, "save": "runs/none", "stages": list(stages)}
        try:
            load_config([], given | keys)
        except ConfigError as error:
            return str(error)
        return ""

    first, lora = {"until": 3, "trainable": ["key"]}, {"lora": {"rank": 4}}
    assert staged(first, lora | {"reset_optimizer": True, "until": 6}, lora) == ""
    assert staged({"until": 3}, {}, lora={"rank": 4}) == ""
    assert "stages[1].lora: the previous stage has no adapters" in staged(first, lora)
    again = staged({"until": 3} | lora, {"lora": {"rank": 5}, "reset_optimizer": True})
    assert "stages[1].lora: the previous stage has adapters" in again
    assert "stages[1].lora: the previous stage has adapters" in staged({"until": 3} | lora, {"reset_optimizer": True})
    both = staged({"until": 3}, lora | {"reset_optimizer": True}, trainable=["key"])
    assert "stages[1]" in both and "lora: contradicts trainable" in both
