"""Stages of a pipeline, one after the other in one process: together they are the model."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_coca.config import Config, load_config
from megatron_coca.data import DrawnPositions
from megatron_coca.model import GPT, LanguageModelLoss, build_model
from megatron_coca.model.pipeline import PipelineStage, Span, StageInput, layer_weights
from megatron_coca.training.engine.deepspeed_engine import cut

KEYS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 16,
    "vocab_size": 50,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "no_weight_tying": True,
    "pos_emb": "rotary",
    "seed": 3,
}
BOUNDS = {2: [0, 3, 6], 3: [0, 1, 4, 6]}

METHODS = {
    "rotary": {"rotary_pct": 0.5},
    "coca": {"pos_emb": "coca", "checkpoint_activations": True},
    "alibi": {"pos_emb": "alibi"},
    "a bias by layer": {"pos_emb": "kerple_log"},
    "a shared bias": {"pos_emb": "rpe"},
    "learned positions": {"pos_emb": "learned"},
    "tied weights": {"no_weight_tying": False},
    "tied weights, learned positions": {"no_weight_tying": False, "pos_emb": "learned"},
    "tied weights, a narrow embedding": {
        "no_weight_tying": False,
        "embedding_width": 8,
        "norm_position": "residual",
        "use_bias_in_output_head": True,
    },
    "a transform before the head, no first norm": {"use_output_transform": True, "skip_first_norm": True},
    "layers that differ": {
        "attention_config": [[["sliding", "global"], "all"]],
        "layer_types": {"sliding": {"pos_emb": "rpe", "sliding_window_width": 5}},
    },
    "learned frequencies": {"rope_scaling": {"rope_type": "clex", "max_factor": 4}},
    "fire, gates": {"pos_emb": "fire", "forgetting_gate": "fox"},
    "STRING, a temperature, layers with Sandwich": {
        "attention_config": [[["biased", "global"], "all"]],
        "layer_types": {"biased": {"pos_emb": "sandwich", "logit_scaling": "none"}},
        "relative_positions": {"type": "string", "window": 6, "local": 2},
        "logit_scaling": {"type": "temperature", "period": 4},
    },
    "norms, sinks, factors, three segments": {
        "pos_emb": "coca",
        "qk_norm": "head",
        "sink_logits": True,
        "logit_scaling": {"type": "ssmax", "bias": True},
        "attention_output_gate": "feature",
        "relative_positions": {"type": "dual_chunk", "chunk_size": 5},
    },
}


def configured(keys: dict[str, Any]) -> Config:
    return load_config([], [f"{name}={value!r}".replace("'", '"') for name, value in (KEYS | keys).items()])


def cut_into(config: Config, count: int) -> list[PipelineStage]:
    return [PipelineStage(build_model(config), BOUNDS[count], index) for index in range(count)]


def batch(packed: bool = False) -> StageInput:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randint(0, 50, (2, 17), generator=generator)
    documents = (torch.rand(2, 16, generator=generator) < 0.2).cumsum(1).int()
    return StageInput(samples, documents, None, documents != 1) if packed else StageInput(samples)


def through(stages: list[PipelineStage], given: StageInput) -> Tensor:
    x = given.samples
    for stage in stages:
        stage.feed([given])
        x = stage(x)
    return x


def gradients(stages: list[PipelineStage]) -> dict[str, Tensor]:
    """By name in the whole model; of shared parameters the sum over their stages."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        for parameter, name in stage.names.items():
            assert parameter.grad is not None, name
            found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return found


@pytest.mark.parametrize(("count", "packed"), [(2, False), (3, True)], ids=["2", "3, packed"])
@pytest.mark.parametrize("keys", METHODS.values(), ids=METHODS.keys())
def test_stages_compute_loss_and_gradients_of_the_model(keys: dict[str, Any], count: int, packed: bool) -> None:
    config, given = configured(keys), batch(packed)
    if config.training_positions is not None:
        drawn = DrawnPositions("stretched", 64, 0).draw(np.arange(2), 16, step=1)
        given = given._replace(positions=torch.from_numpy(drawn))
        assert drawn.max() > 16
    model, stages = build_model(config), cut_into(config, count)
    expected = LanguageModelLoss(model)(**given._asdict())
    expected.backward()
    loss = through(stages, given)
    loss.backward()
    assert torch.equal(loss, expected)
    found = gradients(stages)
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        # Sums over stages are taken in another order than sums over layers.
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("count", BOUNDS)
@pytest.mark.parametrize("keys", METHODS.values(), ids=METHODS.keys())
def test_every_parameter_has_one_owner_and_its_first_value(keys: dict[str, Any], count: int) -> None:
    config = configured(keys)
    whole = dict(build_model(config).named_parameters())
    stages = cut_into(config, count)
    owned = [name for stage in stages for name in stage.names.values() if name not in stage.copies]
    assert sorted(owned) == sorted(whole)
    for stage in stages:
        assert set(stage.names) == set(stage.parameters())
        for parameter, name in stage.names.items():
            assert torch.equal(parameter, whole[name]), name


def test_what_is_shared_and_by_whom() -> None:
    stages = cut_into(configured({"no_weight_tying": False, "pos_emb": "rpe"}), 3)
    shared = {each.path: (each.weights, each.stages) for each in stages[0].sharing}
    assert shared == {"embedding.word_embeddings": (("weight",), (0, 2)), "positions": (("bias.weight",), (1, 2))}, (
        "the first stage has no block, so no use for the table of distances"
    )
    assert [len(stage.copies) for stage in stages] == [0, 0, 2]


def test_micro_batches_are_taken_in_their_order() -> None:
    config = configured({})
    first, last = cut_into(config, 2)
    batches = [batch(), batch(packed=True)]
    for stage in (first, last):
        stage.feed([batches[1]])
        stage.feed(batches)  # drops the unused ones
    losses = [last(first(each.samples)).item() for each in batches]
    model = LanguageModelLoss(build_model(config))
    assert losses == [model(**each._asdict()).item() for each in batches]
    with pytest.raises(IndexError):
        first(batches[0].samples)


@pytest.mark.parametrize(
    ("span", "blocks", "embedding", "head"),
    [
        (Span(0, 1, 6), [], True, False),
        (Span(0, 3, 6), [0, 1], True, False),
        (Span(2, 4, 6), [1, 2], False, False),
        (Span(3, 6, 6), [2, 3], False, True),
        (Span(5, 6, 6), [], False, True),
    ],
)
def test_layers_of_a_span(span: Span, blocks: list[int], embedding: bool, head: bool) -> None:
    assert (list(span.blocks), span.has_embedding, span.has_head) == (blocks, embedding, head)


def blocks_of_stages(keys: dict[str, Any], stages: int) -> list[int]:
    config = configured(keys | {"pipe_parallel_size": stages})
    return [len(cut(build_model(config), config, index).span.blocks) for index in range(stages)]


@pytest.mark.parametrize(
    ("keys", "stages", "expected"),
    [
        ({}, 2, [2, 2]),
        ({}, 4, [1, 1, 1, 1]),
        ({"num_layers": 8}, 3, [3, 3, 2]),
        ({"pipe_partition_method": "uniform"}, 3, [1, 2, 1]),
        ({"pipe_partition_method": "parameters", "vocab_size": 5000}, 3, [0, 4, 0]),
    ],
)
def test_layers_are_divided_by_the_method(keys: dict[str, Any], stages: int, expected: list[int]) -> None:
    assert blocks_of_stages(keys, stages) == expected


def test_parameters_weigh_what_a_stage_would_hold() -> None:
    model: GPT = build_model(configured({"no_weight_tying": False}))
    table = model.embedding.word_embeddings.weight.numel()
    weights = layer_weights(model, "parameters")
    assert weights[0] == table and weights[-1] == table + sum(p.numel() for p in model.norm.parameters())
    assert weights[1] == sum(p.numel() for p in model.blocks[0].parameters())
