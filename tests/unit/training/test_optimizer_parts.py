"""The weights that are trained: names, counts, projections in three layers, and the optimizer's parameters."""

from itertools import chain, combinations
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.layer import PARTS as PACKED
from megatron_coca.attention.layer import SplitProjection, packed_rows
from megatron_coca.checkpoints.compare import check_same_model, differing_keys
from megatron_coca.checkpoints.huggingface.weight_map import BY_HEAD, Heads
from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.config.optimization import TrainablePart
from megatron_coca.model import GPT, LanguageModelLoss, build_model, empty_model
from megatron_coca.model.cost import parameter_count, trained_count
from megatron_coca.training.checkpointing.resume import FREE_GROUPS, FREE_KEYS
from megatron_coca.training.estimate import estimate
from megatron_coca.training.optimizer import PARTS, build_optimizer, parts_of, train_only_parts, trainable_share

TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": 100,
    "pos_emb": "coca",
    "rotary_pct": 0.5,
    "optimizer.params.lr": 1e-3,
}
LLAMA: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 33024,
    "seq_length": 2048,
    "vocab_size": 32000,
    "no_weight_tying": True,
    "activation": "swiglu",
    "norm": "rmsnorm",
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "pos_emb": "coca",
    "precision": "bfloat16",
    "train_micro_batch_size_per_gpu": 1,
}
"""The shape of LLaMA-7B; two thirds of the nominal inner width are 11,008 for the value and as many for its gate."""
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"no_weight_tying": True},
    "grouped": {"num_kv_heads": 2, "use_bias_in_attn_linear": False},
    "one key head": {"num_kv_heads": 1},
    "learned": {"pos_emb": "learned", "rotary_pct": 1.0},
    "kerple": {"pos_emb": "kerple_log", "rotary_pct": 1.0},
    "rpe": {"pos_emb": "rpe", "rotary_pct": 1.0},
    "clex": {"pos_emb": "rotary", "rope_scaling": {"rope_type": "clex"}},
    "scalenorm": {"norm": "scalenorm", "activation": "swiglu"},
    "output gate": {"attention_output_gate": "head", "num_kv_heads": 1},
    "heads by layer type": {
        "attention_config": ["local", "global"],
        "layer_types": {"local": {}},
        "head_shapes": {"local": {"kv_channels": 12, "values_from_keys": True}},
        "layer_scale": True,
    },
    "no norm weights": {"norm": "non_parametric_layernorm"},
    "parallel": {"gpt_j_residual": True, "gpt_j_tied": True},
    "a transform before the head": {"use_output_transform": True, "skip_first_norm": True, "activation": "geglu"},
    "a narrow embedding": {"embedding_width": 16, "norm_position": "residual", "use_bias_in_output_head": True},
}
CHOICES: tuple[tuple[TrainablePart, ...], ...] = (
    ("key",),
    ("query", "value"),
    ("query", "key", "value"),
    ("attention_output", "mlp"),
    ("embedding", "key"),
)


def tiny(trainable: Any = None, **changes: Any) -> Config:
    return load_config([], TINY | changes | {"trainable": trainable})


def prepared(config: Config, device: str = "cpu") -> GPT:
    meta = config.override({"attention_backend": "reference"})  # which others do not run on it
    model = build_model(config) if device == "cpu" else empty_model(meta, device)
    train_only_parts(model, config.optimizer)
    return model


def counted(model: nn.Module) -> tuple[int, int]:
    """The numbers of trained parameters, and of all."""
    sizes = [(parameter.numel() * parameter.requires_grad, parameter.numel()) for parameter in model.parameters()]
    return sum(trained for trained, _ in sizes), sum(size for _, size in sizes)


@pytest.mark.parametrize(
    ("given", "changes", "problem"),
    [
        (["keys"], {}, r"trainable\[0\]: `keys` .*query \| key .*mean `key`"),
        ([], {}, "trainable: .*at least 1 item"),
        ("key", {}, "trainable: expected a list"),
        (["output_head"], {}, "output_head is tied .*; use embedding"),
        (["embedding", "output_head"], {}, "no_weight_tying is false"),
        (["norms"], {"norm": "non_parametric_layernorm"}, "norm non_parametric_layernorm has no weights"),
        (["positions"], {}, "this position method has no weights"),
    ],
)
def test_parts_that_cannot_be_trained_are_errors(given: Any, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        tiny(given, **changes)


def test_the_order_of_parts_means_nothing() -> None:
    one, other = tiny(["value", "key"]), tiny(["key", "value"])
    assert one.optimizer.trainable == other.optimizer.trainable == ["key", "value"]
    assert (
        load_config(
            [],
            TINY,
        ).optimizer.trainable
        is None
    )


def test_a_resumed_run_trains_the_same_and_evaluation_does_not_ask(tmp_path: Path) -> None:
    one, other = tiny(["key"]), tiny(None)
    assert len(differing_keys(one, other, FREE_KEYS, FREE_GROUPS)) == 1
    check_same_model(tmp_path, one, other)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_weight_is_of_one_part(shape: dict[str, Any]) -> None:
    names = [name for name, _ in build_model(tiny(None, **shape)).named_parameters()]
    for name in names:
        assert parts_of(name)
    assert set(chain.from_iterable(parts for _, parts in PARTS)) == set(get_args(TrainablePart))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("parts", CHOICES, ids=" ".join)
def test_counts_are_those_of_the_model(shape: dict[str, Any], parts: tuple[TrainablePart, ...]) -> None:
    config = tiny(list(parts), **shape)
    assert counted(prepared(config, "meta")) == tuple(trainable_share(config))


@pytest.mark.parametrize("shape", ["learned", "kerple", "rpe", "clex"])
def test_learned_positions_are_a_part(shape: str) -> None:
    config = tiny(["positions"], **SHAPES[shape])
    assert trainable_share(config).trained == parameter_count(config).position > 0
    assert counted(prepared(config, "meta")) == tuple(trainable_share(config))


@pytest.mark.parametrize(
    ("parts", "trained", "text"),
    [
        (["key"], 536_870_912, "6,738,415,616 parameters, 536,870,912 (7.97%) trained"),
        (["query", "key", "value"], 1_610_612_736, "6,738,415,616 parameters, 1,610,612,736 (23.90%) trained"),
        (None, 6_738_415_616, "6,738,415,616 parameters"),
    ],
)
def test_the_stages_of_llama_7b(parts: list[TrainablePart] | None, trained: int, text: str) -> None:
    config = load_config([], LLAMA | {"trainable": parts})
    assert counted(prepared(config, "meta")) == trainable_share(config) == (trained, 6_738_415_616)
    assert trainable_share(config).text() == text


SPLITS = [parts for count in (1, 2) for parts in combinations(PACKED, count)]


@pytest.mark.parametrize("shape", ["plain", "grouped", "one key head"])
@pytest.mark.parametrize("parts", SPLITS, ids=" ".join)
def test_three_layers_compute_the_same_as_the_packed_one(shape: str, parts: tuple[TrainablePart, ...]) -> None:
    config = tiny(list(parts), **SHAPES[shape])
    tokens = torch.arange(34).view(2, 17) * 3 % 100
    packed, split = build_model(config).train(), prepared(config).train()
    losses = [LanguageModelLoss(model)(tokens) for model in (packed, split)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    for one, other in zip(packed.blocks, split.blocks, strict=True):
        gradients = _rows(one.attention.query_key_value.weight.grad, config)
        for part, layer in other.attention.query_key_value.named_children():
            assert (layer.weight.grad is not None) == (part in parts)
            if part in parts:
                torch.testing.assert_close(layer.weight.grad, gradients[part], rtol=1e-4, atol=1e-8)
    assert all(parameter.grad is None for parameter in split.parameters() if not parameter.requires_grad)


def _rows(packed: Tensor, config: Config) -> dict[str, Tensor]:
    """In the same way as the import of foreign checkpoints divides packed weights."""
    heads = Heads(config.model.num_attention_heads, config.model.num_kv_heads)
    return dict(zip(PACKED, BY_HEAD.split(packed, heads, 3), strict=True))


@pytest.mark.parametrize("shape", ["plain", "grouped", "one key head"])
def test_three_layers_have_the_rows_of_the_packed_one(shape: str) -> None:
    config = tiny(["key"], **SHAPES[shape])
    for one, other in zip(build_model(config).blocks, prepared(config).blocks, strict=True):
        packed, split = one.attention.query_key_value, other.attention.query_key_value
        assert isinstance(split, SplitProjection)
        for part, rows in _rows(packed.weight, config).items():
            assert torch.equal(getattr(split, part).weight, rows)


@pytest.mark.parametrize(
    ("parts", "split"), [(None, False), (["mlp"], False), (["query", "key", "value"], False), (["key"], True)]
)
def test_a_projection_of_which_all_or_nothing_trains_stays_packed(
    parts: list[TrainablePart] | None, split: bool
) -> None:
    before = torch.get_rng_state()
    blocks = prepared(tiny(parts)).blocks
    assert all(isinstance(block.attention.query_key_value, SplitProjection) == split for block in blocks)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("width", [1, 3])
def test_stretches_of_a_part_lie_where_its_rows_do(queries: int, keys: int, width: int) -> None:
    head_dim = 2
    packed = packed_rows(queries * head_dim, keys * head_dim, head_dim)
    places = torch.arange((queries + 2 * keys) * head_dim * width).view(-1, width)
    assert torch.cat([rows.numbers() for rows in packed.values()]).sort().values.tolist() == list(range(len(places)))
    for rows in packed.values():
        flat = places[rows.numbers()].flatten()
        for begin in range(len(flat)):
            for stop in range(begin, len(flat) + 1):
                ranges = list(rows.ranges(begin, stop, width))
                found = [torch.arange(start, start + last - first) for start, first, last in ranges]
                assert torch.equal(torch.cat([*found, torch.tensor([], dtype=torch.long)]), flat[begin:stop])
                assert [first for _, first, _ in ranges] == [begin, *(last for _, _, last in ranges[:-1])][
                    : len(ranges)
                ]


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("parts", [["key"], ["norms"], ["mlp"]], ids=" ".join)
def test_recomputation_loses_no_gradient(policy: str, parts: list[TrainablePart]) -> None:
    """The hidden states that enter the first block need no gradient if the embedding is not trained."""
    tokens, gradients = torch.arange(34).view(2, 17) * 3 % 100, []
    for recomputed in (False, True):
        config = tiny(parts, checkpoint_activations=recomputed, checkpoint_policy=policy)
        model = prepared(config).train()
        LanguageModelLoss(model)(tokens).backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    assert gradients[0] and all(gradient is not None for gradient in gradients[0])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_the_optimizer_has_only_trained_parameters() -> None:
    config = tiny(["key", "norms"])
    model = prepared(config)
    groups = build_optimizer(model, config.optimizer).param_groups
    given = {parameter for group in groups for parameter in group["params"]}
    assert given == {parameter for parameter in model.parameters() if parameter.requires_grad}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("split", [{}, {"model_parallel_size": 4}, {"pipe_parallel_size": 4}], ids=str)
def test_the_estimate_has_only_states_of_trained_parameters(stage: int, split: dict[str, Any]) -> None:
    keys = LLAMA | split | {"zero_optimization": {"stage": stage, "stage3_max_live_parameters": 0}}
    if "pipe_parallel_size" in split and stage > 1:
        return
    whole, part = (load_config([], keys | {"trainable": parts}) for parts in (None, ["query", "key", "value"]))
    before, after = (estimate(config, 8, 1.0, 1.0).memory for config in (whole, part))
    assert after.weights == pytest.approx(before.weights)
    share = trained_count(part).total / trained_count(whole).total
    tolerance = 0.0 if not split else 0.25  # embedding and head are not divided as the blocks are
    assert after.gradients / before.gradients == pytest.approx(share, rel=1e-6 + tolerance)
    assert after.optimizer / before.optimizer == pytest.approx(share, rel=1e-6 + tolerance)
    assert after.total < before.total


def test_the_estimate_counts_exactly_on_ranks_that_share_matrices() -> None:
    config = load_config([], LLAMA | {"trainable": ["key", "output_head"], "model_parallel_size": 2})
    memory = estimate(config, 2, 1.0, 1.0).memory
    assert memory.gradients == 2 * (536_870_912 / 2 + 32_000 * 4096)
