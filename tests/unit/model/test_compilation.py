"""torch.compile: one graph without a break for every method and backend, the same gradients, and unsupported cases."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from megatron_coca.attention.backends import gated
from megatron_coca.attention.build import BACKENDS
from megatron_coca.attention.inputs import BackendError
from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.model import LanguageModelLoss, build_model, compilation
from megatron_coca.model import build as building

KEYS = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 24, "vocab_size": 48}
MAPS: dict[str, dict[str, Any]] = {
    kind: {"relative_positions": {"type": kind, "window": 8}} for kind in ("rerope", "lm_infinite", "streaming")
} | {"dual_chunk": {"relative_positions": {"type": "dual_chunk", "chunk_size": 10}}}
STRING = {"relative_positions": {"type": "string", "window": 8, "local": 3}}
LEARNED = ("kerple_log", "kerple_power", "rpe")
PLAIN = ("coca", "rotary", "coca_strict", "pope", "xpos", "learned", "sinusoidal", "none", "alibi", *LEARNED)
CASES: dict[str, list[dict[str, Any]]] = {
    "sdpa": [
        *({"pos_emb": name} for name in PLAIN),
        {"pos_emb": "rotary", "rope_scaling": {"rope_type": "clex"}},
        {"pos_emb": "coca", "num_kv_heads": 1},
        {"pos_emb": "coca", "logit_scaling": "log_n_trained"},
        {"pos_emb": "coca", "hidden_dropout": 0.1},
        {"pos_emb": "coca", "num_kv_heads": 1, "forgetting_gate": "fox"},
        {"pos_emb": "coca", "qk_norm": "head", "logit_scaling": {"type": "ssmax", "bias": True}},
        {"pos_emb": "sandwich"},
        {"pos_emb": "coca", "attention_config": ["gau", "gau"], "gau_key_width": 16},
    ],
    "merge": [
        {"pos_emb": "coca", "sink_logits": True} | MAPS["rerope"],
        *({"pos_emb": "rotary"} | keys for keys in MAPS.values()),
        {"pos_emb": "none", "forgetting_gate": "cable", "sliding_window_width": 5},
        {"pos_emb": "coca", "logit_scaling": "temperature"} | STRING,
        {"pos_emb": "coca", "sink_logits": True, "sliding_window_width": 5, "qk_norm": "projection"},
    ],
    "triton": [
        {"pos_emb": "coca", "operand_kernel": "triton"} | MAPS["rerope"],
        {"pos_emb": "pope", "operand_kernel": "triton"} | MAPS["rerope"],
        {"pos_emb": "coca_strict", "operand_kernel": "triton", "pos_emb_options": {"initial_angle": "random"}},
        {"pos_emb": "rotary"} | MAPS["lm_infinite"],
        *({"pos_emb": name} for name in ("rotary", "alibi", "kerple_log")),
    ],
}
FAST = (("sdpa", 0), ("sdpa", 8), ("merge", 0))
GRID = [
    pytest.param(backend, case, id=f"{backend}-{number}", marks=() if (backend, number) in FAST else pytest.mark.slow)
    for backend, cases in CASES.items()
    for number, case in enumerate(cases)
]


def configured(**keys: Any) -> Config:
    return load_config([], KEYS | {"make_vocab_size_divisible_by": 16, "pos_emb": "coca"} | keys)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are traced forward and backward, and run by PyTorch's operations."""
    original = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda block, options: original(block, backend="aot_eager"))
    monkeypatch.setattr(compilation, "missing_compile_tools", lambda device_type: None)
    torch._dynamo.reset()
    counters.clear()


def steps(config: Config) -> dict[str, Tensor]:
    """The loss and all gradients of two steps, then an evaluation of another length."""
    model = LanguageModelLoss(build_model(config))
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(3)
    losses = [model(torch.randint(48, (2, 25), generator=generator)) for _ in range(2)]
    sum(losses).backward()  # type: ignore[union-attr]
    model.eval()
    with torch.no_grad():
        value = model(torch.randint(48, (1, 18), generator=generator))
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"loss": torch.stack(losses).detach(), "evaluated": value} | gradients


@pytest.mark.fewest
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("backend", "case"), GRID)
def test_one_graph_without_a_break(backend: str, case: dict[str, Any]) -> None:
    config = configured(attention_backend=backend, torch_compile=True, **case)
    compiled = steps(config)
    assert dict(counters["graph_break"]) == {}
    assert counters["stats"]["unique_graphs"] == 1, "compiled once for all blocks and steps, not in evaluation"
    plain = steps(config.override({"torch_compile": False}))
    assert plain.keys() == compiled.keys()
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.fewest
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("backend", ["sdpa", "merge"])
def test_gates_in_several_blocks_of_queries(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the backward pass computes each again."""
    monkeypatch.setattr(gated, "QUERY_ROWS", 10)
    test_one_graph_without_a_break(backend, {"pos_emb": "coca", "forgetting_gate": "fox"})


@pytest.mark.usefixtures("traced")
def test_layers_that_differ_are_a_graph_for_each_type() -> None:
    types = {
        "near": {"sliding_window_width": 5, "sink_logits": True},
        "biased": {"pos_emb": "sandwich", "logit_scaling": "ssmax"},
    }
    pattern = {"num_layers": 4, "attention_config": [[["near", "biased"], 2]], "layer_types": types}
    config = configured(torch_compile=True, **pattern)
    compiled = steps(config)
    assert dict(counters["graph_break"]) == {} and counters["stats"]["unique_graphs"] == 2
    for name, value in steps(config.override({"torch_compile": False})).items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_every_backend_is_traced_or_an_error() -> None:
    assert set(CASES) | set(compilation.UNCOMPILED) == set(BACKENDS), "add a case to CASES, or uncompiled to the row"
    for backend in compilation.UNCOMPILED:
        reason = compilation.reason_not_compiled(configured(), backend, "cuda")
        assert reason is not None and reason.startswith(f"attention_backend {backend}: ")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ZeRO 3": ({"zero_optimization": {"stage": 3}}, "torch_compile: not supported with zero_optimization: "),
    "selective": (
        {"checkpoint_activations": True, "checkpoint_policy": "selective"},
        "torch_compile: not supported with checkpoint_policy: ",
    ),
    "tensor parallelism": ({"model_parallel_size": 2}, "torch_compile: not supported with model_parallel_size: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_case_is_an_error_and_left_out_by_auto(name: str) -> None:
    keys, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        configured(torch_compile=True, **keys)
    assert compilation.reason_not_compiled(configured(**keys), "sdpa", "cuda") is not None


def test_blocks_of_queries_that_are_not_traced_are_errors() -> None:
    """They compile on no device or only on one: dense contractions, and the mask of later blocks on CUDA."""
    with pytest.raises(BackendError, match="torch_compile: attn_logit_softcapping: opt_einsum"):
        build_model(configured(attn_logit_softcapping=5.0, torch_compile=True))
    reason = compilation.reason_not_compiled(configured(pos_emb="fire"), "sdpa", "cpu")
    assert reason is not None and reason.startswith("pos_emb fire: opt_einsum")
    gates = configured(forgetting_gate="fox", seq_length=600)
    reason = compilation.reason_not_compiled(gates, "sdpa", "cuda")
    assert reason is not None and reason.startswith("forgetting_gate: torch.compile does not trace")
    assert "forgetting_gate" not in (compilation.reason_not_compiled(gates, "triton", "cuda") or "")
    assert "forgetting_gate" not in (compilation.reason_not_compiled(gates, "sdpa", "cpu") or "")


def test_packed_documents_are_compiled_where_their_lengths_are_not_read() -> None:
    config = configured(reset_attention_mask=True)
    with pytest.raises(BackendError, match="torch_compile: reset_attention_mask: sdpa .*per document"):
        build_model(configured(reset_attention_mask=True, torch_compile=True))
    assert "once per document" in (compilation.reason_not_compiled(config, "merge", "cuda") or "")


@pytest.mark.usefixtures("traced")
def test_auto_compiles_on_cuda_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    compiled: list[int] = []
    monkeypatch.setattr(building, "compile_blocks", lambda blocks: compiled.append(len(blocks)))
    for device in ("cpu", "cuda"):
        building._compiled(build_model(configured()), configured(), device, True)
        assert len(compiled) == (device == "cuda")
    packed = configured(reset_attention_mask=True, attention_dropout=0.1)  # which `triton`, otherwise taken, has not
    with caplog.at_level(logging.INFO):
        building._compiled(build_model(packed), packed, "cuda", True)
    assert len(compiled) == 1 and "torch_compile: disabled: reset_attention_mask" in caplog.text


def test_a_loss_without_chunks_has_no_kernel() -> None:
    with pytest.raises(ConfigError, match="loss_kernel: triton needs chunks of tokens"):
        configured(loss_kernel="triton", loss_chunk_size=0)
