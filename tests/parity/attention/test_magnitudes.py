"""Polar forms from magnitudes: the Triton kernels compute Q' and K', and the cache stores magnitudes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_coca.attention.layer import cache_bytes
from megatron_coca.config import load_config
from megatron_coca.evaluation.attention_maps import attention_maps
from megatron_coca.model import GPT, build_model
from tests.parity.attention_cases import times_plain

pytest.importorskip("triton")

LENGTH = 14
SHAPE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_kv_heads": 1, "seq_length": 8}
METHODS: dict[str, dict[str, Any]] = {
    "pope": {"pos_emb": "pope", "pos_emb_options": {"offset": "uniform"}},
    "partial": {"pos_emb": "pope", "rotary_pct": 0.5, "logit_scaling": "log_n"},
    "an angle": {"pos_emb": "polar", "pos_emb_options": {"offset": "none", "initial_angle": -0.7}},
    "shared frequencies": {"pos_emb": "polar", "pos_emb_options": {"frequencies": "pair"}, "logit_scaling": "ssmax"},
    "shared magnitudes": {
        "pos_emb": "polar",
        "pos_emb_options": {"magnitude": "relu_mean", "power": 2},
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    },
}
WIDE: dict[str, dict[str, Any]] = {
    "two segments": {"relative_positions": {"type": "rerope", "window": 4}},
    "gates": {"forgetting_gate": "fox"},
    "wide heads": {"hidden_size": 288, "rotary_pct": 0.5},
    "another form": {"pos_emb": "coca_strict"},
    "another backend": {"attention_backend": "merge"},
}


def build(backend: str = "triton", **keys: Any) -> GPT:
    model = build_model(load_config([], SHAPE | {"vocab_size": 50, "attention_backend": backend} | keys))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def tokens() -> Tensor:
    return torch.randint(50, (1, LENGTH), generator=torch.Generator().manual_seed(0))


def results(model: GPT) -> list[Tensor]:
    """The logits and the gradients of all weights."""
    logits = model(tokens(), documents=(torch.arange(LENGTH) // 9)[None])
    gradients = torch.autograd.grad(logits.sin().sum(), [x for x in model.parameters() if x.requires_grad])
    return [logits, *gradients]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "pope" else pytest.mark.slow) for name in METHODS]
)
def test_a_model_is_the_same_with_magnitudes(name: str) -> None:
    ours, theirs = build(**METHODS[name]), build("reference", **METHODS[name])
    assert ours.methods["global"].magnitudes and not theirs.methods["global"].magnitudes
    for got, expected in zip(results(ours), results(theirs), strict=True):
        assert (got - expected).norm() <= 1e-5 * expected.norm()
    seen = (attention_maps(model, tokens())[0].weights for model in (ours, theirs))
    torch.testing.assert_close(*seen, atol=1e-5, rtol=1e-5)


def test_the_cache_has_the_size_of_that_of_rope() -> None:
    model, ids = build(**METHODS["shared magnitudes"]), tokens()
    cache = model.new_cache(LENGTH)
    with torch.no_grad():
        logits = torch.cat([model(part, cache=cache) for part in ids.split([9, 1, 4], dim=1)], dim=1)
        torch.testing.assert_close(logits, model(ids), atol=1e-5, rtol=1e-5)
    assert [buffer.shape[-1] for buffer in cache.layers[0].buffers] == [16, 16]
    models = model, build(pos_emb="rotary"), build("merge", pos_emb="pope")
    own, rope, wide = (cache_bytes(each.methods.values(), 100, torch.float32) for each in models)
    assert own == rope and 2 * wide == 3 * rope, "other backends keep K' twice as wide as V"


def test_training_saves_no_more_than_rope() -> None:
    """All tensors that the attention layer saves, except for tables, which all layers and heads share."""

    def saved(model: GPT) -> int:
        found: dict[int, int] = {}

        def note(x: Tensor) -> Tensor:
            if not isinstance(x, nn.Parameter) and x.dim() == 4 and x.shape[1] in (1, 2):
                found[x.data_ptr()] = x.numel()
            return x

        hidden = torch.ones(1, LENGTH, 32, requires_grad=True)
        context = model.contexts(torch.arange(LENGTH), LENGTH, torch.float32)["global"]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            model.blocks[0].attention(hidden, context)
        return sum(found.values())

    wide = build(**METHODS["pope"])
    wide.blocks[0].attention.method = replace(wide.methods["global"], magnitudes=False)
    assert 0 < saved(build(**METHODS["pope"])) <= saved(build(pos_emb="rotary")) < saved(wide)


@pytest.mark.parametrize("name", WIDE)
def test_other_models_pass_operands(name: str) -> None:
    keys = {"pos_emb": "pope", "attention_backend": "triton"} | WIDE[name]
    assert not build(keys.pop("attention_backend"), **keys).methods["global"].magnitudes


def test_learned_frequencies_pass_operands_in_training() -> None:
    """The kernels have no gradients of the tables."""
    keys = {"pos_emb": "pope", "rope_scaling": {"rope_type": "clex"}}
    model = build(**keys).train()
    model(tokens()[:, :8]).sum().backward()
    assert model.positions.clex.up.grad is not None


def test_the_operand_kernel_leaves_magnitudes_to_attention() -> None:
    """With `operand_kernel: triton` too, the cache has the size of RoPE's."""
    models = [build(**METHODS["pope"], operand_kernel=kernel) for kernel in ("torch", "triton")]
    sizes = [cache_bytes(model.methods.values(), 100, torch.float32) for model in models]
    assert sizes[0] == sizes[1]
    for one, other in zip(*map(results, models), strict=True):
        assert torch.equal(one, other)


FUSED = {
    **{name: keys | {"attention_backend": "merge"} for name, keys in METHODS.items() if name != "partial"},
    "two segments": METHODS["pope"] | WIDE["two segments"],
    "another angle": {"pos_emb": "coca_strict", "pos_emb_options": {"initial_angle": 0.7}, "rotary_pct": 0.5},
    "random angles": {"pos_emb": "coca_strict", "pos_emb_options": {"initial_angle": "random"}},
}
"""Methods of which `operand_kernel: triton` computes wide operands."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("pope", "another angle") else pytest.mark.slow) for name in FUSED]
)
def test_the_operand_kernel_computes_what_pytorch_does(name: str) -> None:
    """Logits, gradients and a decoded token have at most twice the errors of PyTorch's operations, against float64."""
    keys = {"backend": FUSED[name].get("attention_backend", "auto")} | FUSED[name]
    keys.pop("attention_backend", None)
    plain, fused = (build(**keys, operand_kernel=kernel) for kernel in ("torch", "triton"))
    exact = build(**keys, operand_kernel="torch").double()
    found = ([*results(model), decoded(model)] for model in (exact, plain, fused))
    for true, theirs, ours in zip(*found, strict=True):
        assert (ours - true).norm() <= times_plain(true) * (theirs - true).norm() + 1e-7 * true.norm()


def decoded(model: GPT) -> Tensor:
    """The logits of the last token, after a pass that caches the others."""
    cache = model.new_cache(length=LENGTH)
    with torch.no_grad():
        model(tokens()[:, :-1], cache=cache)
        return model(tokens()[:, -1:], cache=cache)
