"""Recomputed activations: the same losses and gradients, fewer bytes kept; and steps that never wait for the device."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_coca.attention.inputs import BackendError
from megatron_coca.config import ConfigError, load_config
from megatron_coca.model import LanguageModelLoss, build_model, compilation
from megatron_coca.model.gpt import CONTEXTS

KEYS = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 64,
    "vocab_size": 90,
    "make_vocab_size_divisible_by": 16,
}
CHOICES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"checkpoint_activations": True, "checkpoint_policy": "selective"},
    "full": {"checkpoint_activations": True},
    "full in pairs": {"checkpoint_activations": True, "checkpoint_num_layers": 2},
    "selective in one group": {
        "checkpoint_activations": True,
        "checkpoint_policy": "selective",
        "checkpoint_num_layers": 9,
    },
}
COMPOSED: dict[str, dict[str, Any]] = {
    "norms, sinks, factors, three segments": {
        "qk_norm": "head",
        "sink_logits": True,
        "logit_scaling": {"type": "ssmax", "bias": True},
        "attention_output_gate": "head",
        "relative_positions": {"type": "dual_chunk", "chunk_size": 20},
    },
    "fire": {"pos_emb": "fire"},
    "sandwich": {"pos_emb": "sandwich"},
    "units and blocks": {"attention_config": ["gau", "global", "gau"], "gau_key_width": 16},
    "string": {"pos_emb": "rotary", "relative_positions": {"type": "string"}, "logit_scaling": "temperature"},
}
ORDINARY = ("rotary", "coca", "coca_strict", "pope", "xpos", "alibi", "rpe", "learned", "sinusoidal", "none")


def samples() -> Tensor:
    return torch.randint(90, (2, 65), generator=torch.Generator().manual_seed(0))


def trained(**keys: Any) -> LanguageModelLoss:
    return LanguageModelLoss(build_model(load_config([], KEYS | {"pos_emb": "coca"} | keys)))


def results(choice: str, **keys: Any) -> dict[str, Tensor]:
    """The loss and every gradient."""
    module = trained(**CHOICES[choice], **keys)
    torch.manual_seed(5)
    loss = module(samples())
    loss.backward()
    return {"loss": loss.detach()} | {name: each.grad for name, each in module.named_parameters()}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("pos_emb", ["coca", "rotary", "alibi"])
@pytest.mark.parametrize("choice", [name for name in CHOICES if name != "none"])
def test_recomputing_changes_no_bit(choice: str, pos_emb: str, dropout: float) -> None:
    keys = {"pos_emb": pos_emb, "hidden_dropout": dropout, "attention_dropout": dropout}
    kept, again = results("none", **keys), results(choice, **keys)
    for name, each in kept.items():
        assert torch.equal(again[name], each), name


@pytest.mark.parametrize("choice", ["selective", "full"])
@pytest.mark.parametrize("name", COMPOSED)
def test_recomputing_changes_no_bit_of_what_layers_learn(name: str, choice: str) -> None:
    kept, again = results("none", **COMPOSED[name]), results(choice, **COMPOSED[name])
    assert kept.keys() == again.keys() and all(torch.equal(again[name], each) for name, each in kept.items())


def test_every_policy_is_tested() -> None:
    assert {each.get("checkpoint_policy", "full") for each in CHOICES.values()} == CONTEXTS.keys()


ZERO3 = {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize("keys", [ZERO3, {"model_parallel_size": 2}])
def test_selective_is_an_error_where_deepspeed_changes_kept_products(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="checkpoint_policy: selective cannot store the matrix products"):
        load_config([], KEYS | keys | CHOICES["selective"] | {"pos_emb": "coca"})
    load_config([], KEYS | keys | CHOICES["full"] | {"pos_emb": "coca"})


def test_selective_is_taken_with_pytorchs_linear_layers_under_zero_3() -> None:
    section = {"zero_optimization": {"stage": 3, "memory_efficient_linear": False}}
    load_config([], KEYS | section | CHOICES["selective"] | {"pos_emb": "coca"})


def test_bytes_kept_fall_in_order() -> None:
    kept = {choice: _kept(choice) for choice in CHOICES}
    assert kept["none"] > 1.3 * kept["selective"] and kept["selective"] > 1.3 * kept["full"], kept
    assert kept["full"] > kept["full in pairs"], kept


def _kept(choice: str) -> int:
    """Bytes that the forward pass leaves behind."""
    module = trained(**CHOICES[choice], num_layers=6)
    ids = samples()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        loss = module(ids)
    events = [each for each in run.profiler.kineto_results.events() if each.name() == "[memory]"]
    assert loss.requires_grad
    return sum(each.nbytes() for each in events)


class NoWaiting(TorchDispatchMode):
    """Raises an error for operations that make the host wait for a GPU: reading a number, or shapes that depend on
    values.
    """

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name.removeprefix("aten::").strip("_") not in {name.strip("_") for name in self.WAITING}, (
            f"{func} waits for the device"
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("choice", ["none", "selective", "full"])
@pytest.mark.parametrize("pos_emb", ORDINARY)
def test_a_step_never_waits_for_the_device(pos_emb: str, choice: str) -> None:
    module, mask = trained(pos_emb=pos_emb, **CHOICES[choice]), torch.rand(2, 64) > 0.3
    with NoWaiting():
        module(samples(), loss_mask=mask).backward()


def test_waiting_is_noticed() -> None:
    for wait in (lambda x: x.max().item(), lambda x: x.nonzero(), lambda x: bool(x.any())):
        with pytest.raises(AssertionError, match="waits"), NoWaiting():
            wait(torch.ones(3))


def test_without_a_compiler_compiling_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "missing_compile_tools", lambda device_type: "no C++ compiler was found")
    with pytest.raises(BackendError, match=r"torch_compile: no C\+\+ compiler .*torch_compile=false"):
        trained(torch_compile=True)
    config = load_config([], KEYS | {"pos_emb": "coca", "torch_compile": True})
    assert build_model(config, training=False), "evaluation compiles nothing"


@pytest.mark.slow
@pytest.mark.skipif(compilation.missing_compile_tools("cpu") is not None, reason="no C++ compiler")
@pytest.mark.parametrize("pos_emb", ["rotary", "coca"])
def test_compiled_blocks_give_the_same_gradients(pos_emb: str) -> None:
    eager, compiled = results("none", pos_emb=pos_emb), results("none", pos_emb=pos_emb, torch_compile=True)
    assert eager.keys() == compiled.keys(), "names of parameters stay"
    for name, each in eager.items():
        torch.testing.assert_close(compiled[name], each, rtol=1e-4, atol=1e-6, msg=name)
