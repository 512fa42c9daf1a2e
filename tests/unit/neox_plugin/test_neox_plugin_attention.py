"""The plugin for GPT-NeoX against a stub of the functions that it needs: attention, schedule, lengths, activation."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.build import BACKENDS, build_method
from megatron_coca.attention.layer import LayerCache, SelfAttention
from megatron_coca.attention.method import PositionEncoding
from megatron_coca.config import Config
from megatron_coca.config.schedule import ScheduleConfig, learning_rate
from megatron_coca.neox_plugin import IncompatibleError, activate
from megatron_coca.neox_plugin.keys import resolve
from megatron_coca.neox_plugin.upstream import TESTED_COMMIT
from tests.neox.stubbed import Upstream, stub

__all__ = ["stub"]

LENGTH, PROMPT = 24, 9
"""Longer than the training length of 16; a part of it."""

METHODS: dict[str, dict[str, Any]] = {
    "coca": {"pos_emb": "coca"},
    "strict, partial": {"pos_emb": "coca_strict", "rotary_pct": 0.5},
    "pope, grouped": {"pos_emb": "pope", "num_kv_heads": 2, "pos_emb_options": {"offset": "uniform"}},
    "strict with an angle": {"pos_emb": "coca_strict", "pos_emb_options": {"initial_angle": -0.7}},
    "xpos": {"pos_emb": "xpos"},
    "dynamic": {"pos_emb": "coca", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"pos_emb": "rotary", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "rope_id": {"pos_emb": "rotary", "rotary_frequencies": {"type": "rope_id"}},
    "map": {"pos_emb": "rotary", "relative_positions": {"type": "rerope"}},
    "logits": {"pos_emb": "none", "logit_scaling": "log_n"},
    "grouped": {"pos_emb": "coca", "num_kv_heads": 2},
    "grouped, flash": {"pos_emb": "coca", "num_kv_heads": 2, "attention_config": ["flash", "flash"]},
}


def attention(stub: Upstream, made: Any, **options: Any) -> Any:
    """One layer, as GPT-NeoX's transformer makes it."""
    torch.manual_seed(0)
    make = stub["model.transformer"].ParallelSelfAttention
    rotary = made.pos_emb == "rotary"
    return make(made, None, None, None, layer_number=0, rotary=rotary, **options)


def own(config: Config, layer: Any) -> tuple[SelfAttention, PositionEncoding]:
    """Our layer with the same weights, on the backend that everything is tested against."""
    model, method = config.model, build_method(config.position, config.model)
    key_heads = model.num_kv_heads or model.num_attention_heads
    made = SelfAttention(model.hidden_size, model.num_attention_heads, key_heads, method, BACKENDS["reference"])
    made.load_state_dict(dict(layer.named_parameters()))
    return made.eval(), PositionEncoding(method).eval()


def hidden() -> Tensor:
    """[tokens, batch, width]"""
    return torch.randn(LENGTH, 2, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_attention_is_ours(name: str, stub: Upstream) -> None:
    activate()
    made = stub.arguments(**METHODS[name])
    layer = attention(stub, made).eval()
    ours, encoding = own(resolve(made), layer)
    expected = ours(hidden().transpose(0, 1), encoding(torch.arange(LENGTH), LENGTH, torch.float32))
    found, bias = layer(hidden(), None)
    torch.testing.assert_close(found.transpose(0, 1), expected, rtol=1e-5, atol=1e-6)
    assert bias is None and not layer.rotated, "GPT-NeoX turns nothing itself"


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_cached_tokens_are_attended_to_as_in_our_cache(name: str, stub: Upstream) -> None:
    activate()
    made = stub.arguments(**METHODS[name] | {"attention_config": ["flash", "flash"]})
    layer = attention(stub, made, use_cache=True).eval()
    ours, encoding = own(resolve(made), layer)
    past, cache, seen = None, LayerCache(), 0
    for part in hidden().split([PROMPT] + [1] * (LENGTH - PROMPT)):
        (found, past), _ = layer(part, None, layer_past=past)
        seen += len(part)
        positions = torch.arange(seen)
        frame = encoding(positions[seen - len(part) :], seen, torch.float32, positions)
        expected = ours(part.transpose(0, 1), frame, cache)
        torch.testing.assert_close(found.transpose(0, 1), expected, rtol=1e-5, atol=1e-6)


def test_dropout_is_drawn_from_the_ranks_own_random_states(stub: Upstream) -> None:
    activate()
    layer = attention(stub, stub.arguments(pos_emb="coca", attention_dropout=0.5))
    tracker = stub["mpu"].TRACKER
    with torch.no_grad():
        assert torch.equal(layer.eval()(hidden(), None)[0], layer(hidden(), None)[0]) and tracker.forks == 0
        assert not torch.equal(layer.train()(hidden(), None)[0], layer(hidden(), None)[0]) and tracker.forks == 2


@pytest.mark.parametrize("method", ["learned", "rotary", "sinusoidal", "rpe", "alibi", "none"])
def test_methods_of_upstreams_get_its_own_layer(method: str, stub: Upstream) -> None:
    original = stub["model.transformer"].ParallelSelfAttention
    activate()
    layer = attention(stub, stub.arguments(pos_emb=method))
    assert type(layer) is original and layer.rotated == (method == "rotary")


def test_the_first_pass_checks_that_our_attention_is_called_and_no_later_one(stub: Upstream) -> None:
    activate()
    layer = attention(stub, stub.arguments(pos_emb="coca"))
    assert layer._forward_hooks
    layer(hidden(), None)
    assert not layer._forward_hooks


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_that_calls_another_method_is_an_error(
    training: bool, stub: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a change of GPT-NeoX's that no signature shows."""
    upstream = stub["model.transformer"].ParallelSelfAttention
    monkeypatch.setattr(upstream, "forward", lambda self, x, mask, layer_past=None: (self.dense(x), None))
    activate()
    layer = attention(stub, stub.arguments(pos_emb="coca")).train(training)
    with pytest.raises(IncompatibleError, match="called neither its attention nor its flash_attention") as caught:
        layer(hidden(), None)
    assert TESTED_COMMIT in str(caught.value) and "use the tested commit" in str(caught.value)


def test_a_layer_that_rotates_by_itself_is_an_error(stub: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = stub["model.transformer"].ParallelSelfAttention
    monkeypatch.setattr(kind, "rotary_emb", torch.nn.Identity(), raising=False)
    activate()
    with pytest.raises(IncompatibleError, match="rotates queries and keys in"):
        attention(stub, stub.arguments(pos_emb="rotary", rope_scaling={"rope_type": "linear", "factor": 2.0}))


def rates(stub: Upstream, **keys: Any) -> list[float]:
    """The learning rate of every step."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=9.0)
    scheduler = stub["training"].get_learning_rate_scheduler(optimizer, stub.arguments(**keys))
    found = []
    for _ in range(25):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return found


@pytest.mark.parametrize(
    "keys",
    [
        {"lr_decay_style": "linear_to_min_lr", "min_lr": 1e-4, "warmup": 0.2, "lr_warmup_init": 1e-6},
        {"lr_decay_style": "Linear_To_Min_LR", "min_lr": 1e-4, "lr_decay_iters": 15},
        {"lr_decay_style": "cosine", "warmup": 0.3, "lr_warmup_init": 1e-5},
    ],
)
def test_rates_are_ours_where_a_key_of_ours_asks_for_it(keys: dict[str, Any], stub: Upstream) -> None:
    activate()
    lower = keys | {"lr_decay_style": keys["lr_decay_style"].lower()}
    schedule = ScheduleConfig.model_validate({"train_iters": 20} | lower)
    assert rates(stub, **keys) == pytest.approx([learning_rate(step, 1e-3, schedule) for step in range(25)])


def test_rates_are_upstreams_elsewhere(stub: Upstream) -> None:
    activate()
    assert rates(stub, lr_decay_style="cosine") == [1e-3] * 25


def test_a_schedule_follows_the_values_of_a_checkpoint(stub: Upstream) -> None:
    activate()
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=9.0)
    made = stub.arguments(lr_decay_style="linear_to_min_lr", lr_warmup_init=1e-6)
    scheduler = stub["training"].get_learning_rate_scheduler(optimizer, made)
    scheduler.start_lr, scheduler.min_lr, scheduler.end_iter, scheduler.warmup_iter = 2e-3, 1e-3, 40, 4.0
    scheduler.step(30)
    schedule = ScheduleConfig(lr_decay_style="linear_to_min_lr", train_iters=40, warmup=0.1, min_lr=1e-3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(learning_rate(30, 2e-3, schedule))


SAVED = {"max_position_embeddings": 32, "hidden_size": 32}


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"pos_emb": "coca"}, None),
        ({"pos_emb": "coca", "rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, None),
        ({"pos_emb": "coca", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling"),
        ({"pos_emb": "none", "logit_scaling": "log_n"}, "logit_scaling"),
        ({"pos_emb": "rotary", "relative_positions": {"type": "rerope"}}, "relative_positions"),
        ({"pos_emb": "rotary", "relative_positions": {"type": "rerope", "window": 8}}, None),
        ({"pos_emb": "coca", "rotary_frequencies": {"type": "rope_id"}}, "rotary_frequencies"),
    ],
)
def test_a_longer_run_names_the_trained_length_where_it_matters(
    keys: dict[str, Any], key: str | None, stub: Upstream
) -> None:
    activate()
    check = stub["checkpointing"].check_checkpoint_args
    longer = stub.arguments(seq_length=64, **keys)
    if key is not None:
        with pytest.raises(ValueError, match=f"{key}: depends .* seq_length is 64 .*original_max_position_embeddings"):
            check(longer, SAVED)
        told = keys.get("rope_scaling", {"rope_type": "default"}) | {"original_max_position_embeddings": 16}
        longer = stub.arguments(seq_length=64, **keys | {"rope_scaling": told})
        said, trained = (resolve(each) for each in (longer, stub.arguments(**keys)))
        methods = [build_method(each.position, each.model) for each in (said, trained)]
        assert methods[0].training_length == methods[1].training_length == 16
        bands = [[(band.low, band.high) for band in method.bands] for method in methods]
        assert bands[0] == bands[1], "maps and logits measure against it too"
    check(longer, SAVED)
    check(stub.arguments(**keys), SAVED)  # no longer than the saved length
    with pytest.raises(AssertionError, match="hidden_size"):
        check(longer, SAVED | {"hidden_size": 64})


@pytest.mark.parametrize("keys", [{"pos_emb": "rotary"}, {"pos_emb": "learned", "logit_scaling": "log_n"}])
def test_other_checkpoints_keep_the_check_of_their_length(keys: dict[str, Any], stub: Upstream) -> None:
    activate()
    with pytest.raises(AssertionError, match="max_position_embeddings"):
        stub["checkpointing"].check_checkpoint_args(stub.arguments(**keys), SAVED)


class Model:
    """Counts how often its cache was emptied."""

    def __init__(self) -> None:
        self.module, self.cleared = self, 0

    def clear_cache(self) -> None:
        self.cleared += 1


def test_every_prompt_begins_with_an_empty_cache(stub: Upstream) -> None:
    activate()
    stream, model = stub["text_generation_utils"].stream_tokens, Model()
    for count, method in enumerate(["coca", "coca", "rotary"]):
        assert list(stream(stub.arguments(pos_emb=method), model, [[1]])) == [(model, [[1]])]
        assert model.cleared == min(count + 1, 2)


@pytest.mark.parametrize("pipeline", [True, False])
def test_validation_reads_a_loss_and_its_metrics(pipeline: bool, stub: Upstream) -> None:
    """GPT-NeoX's pipeline returns only the loss, but its validation unpacks two values."""
    activate()
    loss = torch.tensor(2.0)
    given = SimpleNamespace(is_pipe_parallel=pipeline)
    found, metrics = stub["training"].forward_step(iter([loss]), lambda batch: batch, given, None)
    assert found is loss and metrics == ({} if pipeline else {"accuracy": loss})


def test_activation_twice_is_activation_once(stub: Upstream) -> None:
    activate()
    transformer, training = stub["model.transformer"], stub["training"]
    before = transformer.ParallelSelfAttention, training.get_learning_rate_scheduler
    activate()
    assert before == (transformer.ParallelSelfAttention, training.get_learning_rate_scheduler)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("training", "get_learning_rate_scheduler"),
        ("model.transformer", "ParallelSelfAttention"),
        ("neox_arguments.NeoXArgs", "get_deepspeed_main_args"),
        ("mpu", "get_cuda_rng_tracker"),
        ("mpu", "get_model_parallel_rank"),
    ],
)
def test_a_missing_name_is_an_error(owner: str, name: str, stub: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, kind = owner.partition(".NeoX")
    monkeypatch.delattr(getattr(stub[module], f"NeoX{kind}") if kind else stub[module], name)
    with pytest.raises(IncompatibleError, match=f"lacks a part .*{name}") as caught:
        activate()
    assert "ea7aefd8" in str(caught.value) and str(stub["mpu"].__file__.rsplit("/megatron", 1)[0]) in str(caught.value)


def test_a_missing_key_is_an_error(stub: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = sys.modules["megatron.neox_arguments.neox_args"].NeoXArgsLRScheduler.__dataclass_fields__
    monkeypatch.delitem(fields, "lr_decay_style")
    with pytest.raises(IncompatibleError, match="lacks a part .*lr_decay_style"):
        activate()


def test_another_package_in_its_place_is_an_error(stub: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]  # the fixture restores it
    monkeypatch.setattr(sys, "path", [place for place in sys.path if "neox/stub" not in place])
    with pytest.raises(IncompatibleError, match="cannot be imported .* its checkout.*megatron-core"):
        activate()
