"""The choice of an attention backend: the backend that is taken, the reasons against others, and errors."""

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from docs.generate import CPU_COLUMNS
from docs.generate import needs as rows_of_the_page
from megatron_coca import methods
from megatron_coca.attention.backends.flex import FlexBackend
from megatron_coca.attention.backends.merge import MergeBackend
from megatron_coca.attention.build import (
    AUTOMATIC,
    BACKENDS,
    PREFERRED,
    BackendError,
    automatic,
    build_method,
    build_methods,
    select_backend,
    varies,
)
from megatron_coca.attention.inputs import CAUSAL, AttentionInputs, Backend, Band, Needs, Segment
from megatron_coca.attention.method import PositionEncoding
from megatron_coca.attention.positions.forms import SCORE_FORMS, without_kernels
from megatron_coca.config import load_config
from megatron_coca.config.position import PositionConfig
from megatron_coca.model import build_model
from megatron_coca.model.build import backend_needs

NEEDS = rows_of_the_page()
NEAR_AND_FAR = (Band(0, 8), Band(8))
SHAPE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 64}


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        (Needs("cpu"), "sdpa"),
        (Needs("cpu", bias="linear", dropout=0.1), "sdpa"),
        (Needs("cpu", bands=NEAR_AND_FAR), "merge"),
        (Needs("cpu", bands=(Band(0, 8),)), "merge"),
        (Needs("cuda", dropout=0.1), "sdpa"),
        (Needs("cuda", bands=NEAR_AND_FAR), "triton"),
        (Needs("cuda", bias="log"), "triton"),
        (Needs("cuda", bias="log", gates=True), "triton"),
        (Needs("cuda", bias="buckets"), "flex"),
        (Needs("cpu", ring=True), "merge"),
        (Needs("cuda", bands=NEAR_AND_FAR, ring=True), "merge"),
        (Needs("cpu", bias="linear", length=65536, ring=True), "reference"),
    ],
)
def test_automatic_choice(needs: Needs, expected: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="megatron_coca"):
        name, backend = select_backend("auto", needs)
    assert (name, backend) == (expected, BACKENDS[expected])
    before = automatic(needs)
    assert (f"attention backend {expected}; not" in caplog.text) == (before[0] != expected)
    for candidate in before[: before.index(expected)]:
        assert f"not {candidate}: {BACKENDS[candidate].supports(needs)}" in caplog.text


@pytest.mark.parametrize("changes", [{"softcap": 30.0}, {"gates": True}], ids=str)
def test_rings_compute_dense_scores_for(changes: dict[str, Any]) -> None:
    assert select_backend("auto", replace(Needs("cuda", ring=True), **changes))[0] == "reference"


@pytest.mark.parametrize("name", ["sdpa", "flex", "triton"])
def test_rings_need_the_log_sum_exp(name: str) -> None:
    with pytest.raises(BackendError, match=rf"attention_backend: {name} cannot .* only merge and reference return it"):
        select_backend(name, Needs("cpu", ring=True))


def test_a_model_for_evaluation_has_no_ring() -> None:
    config = load_config([], SHAPE | {"context_parallel_size": 2, "pos_emb": "rotary"})
    (method,) = build_methods(config).values()
    assert backend_needs(config, method, "cpu").ring and not backend_needs(config, method, "cpu", training=False).ring


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        (Needs("cuda", packed=True), "flex"),
        (Needs("cuda", packed=True, dropout=0.1), "sdpa"),
        (Needs("cuda", packed=True, bands=NEAR_AND_FAR), "triton"),
        (Needs("cuda", packed=True, deterministic=True), "triton"),
        (Needs("cuda", bias="linear", deterministic=True), "triton"),
        (Needs("cuda", packed=True, bias="buckets"), "flex"),
        (Needs("cuda", packed=True, bias="linear"), "flex"),
        (Needs("cuda", bias="linear"), "triton"),
        (Needs("cuda", bias="linear", head_dim=320), "flex"),
        (Needs("cuda", bias="power", softcap=30.0), "flex"),
        (Needs("cpu", packed=True), "sdpa"),
        (Needs("cuda", deterministic=True), "triton"),
        (Needs("cuda", deterministic=True, dropout=0.1), "sdpa"),
    ],
)
def test_what_goes_first_for_some_needs(needs: Needs, expected: str) -> None:
    assert select_backend("auto", needs)[0] == expected


def test_kernels_that_never_ran_on_a_gpu_are_not_the_first_choice() -> None:
    """Packed documents and biases get PyTorch's kernels until PREFERRED names the measurement of ours."""
    for name in ("packed documents", "formula of the distance", "distance bias"):
        assert PREFERRED[name].backend == "flex" or PREFERRED[name].measured is not None


def test_gradients_that_vary_are_errors() -> None:
    needs = Needs("cuda", bias="buckets", deterministic=True)
    refused = {name for name in BACKENDS if varies(name, needs)}
    assert refused == {"flex"} and not any(varies(name, replace(needs, deterministic=False)) for name in BACKENDS)
    with pytest.raises(BackendError, match="flex: deterministic: its kernels sum bias gradients"):
        select_backend("auto", needs)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, Needs("cuda", 16, length=16)),
        ({"reset_attention_mask": True}, Needs("cuda", 16, packed=True, length=16)),
        ({"deterministic": True}, Needs("cuda", 16, length=16, deterministic=True)),
    ],
)
def test_a_run_asks_for_what_its_keys_say(keys: dict[str, Any], expected: Needs) -> None:
    config = load_config([], SHAPE | {"pos_emb": "rotary"} | keys)
    method = build_method(config.position, config.model)
    assert backend_needs(config, method, "cuda") == expected
    assert backend_needs(config, method, "cuda", training=False) == Needs("cuda", 16)


def test_two_segments_on_cuda_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert select_backend("auto", Needs("cuda", bands=NEAR_AND_FAR))[0] == "merge"


def test_what_is_taken_only_by_name() -> None:
    assert "reference" not in {*AUTOMATIC["cuda"], *AUTOMATIC["cpu"]}
    needs = Needs("cuda", bias="linear", dropout=0.1)
    with pytest.raises(BackendError) as caught:
        select_backend("auto", needs)
    for part in (
        "sdpa: except on the CPU",
        "merge: its kernel calls have no mask",
        "flex: FlexAttention has no dropout",
        "set attention_backend: reference",
    ):
        assert part in str(caught.value)
    assert select_backend("reference", needs) == ("reference", BACKENDS["reference"])


def test_a_form_without_a_fused_kernel_is_an_error_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new form has none; all built-in ones have one."""
    config = load_config([], SHAPE | {"pos_emb": "coca", "operand_kernel": "triton"})
    assert build_method(config.position, config.model)
    monkeypatch.setitem(SCORE_FORMS, "coca", replace(SCORE_FORMS["coca"], kernel=None))
    with pytest.raises(BackendError, match="operand_kernel: triton does not support .*coca"):
        build_method(config.position, config.model)
    assert all(form.fused for name, form in SCORE_FORMS.items() if name != "coca")


def test_a_form_that_was_derived_from_another_loses_its_kernels() -> None:
    """They would compute the built-in form on a GPU, and its own functions on the CPU."""
    for name in ("coca", "pope", "coca_strict"):
        built_in = SCORE_FORMS[name]
        assert without_kernels(built_in) is built_in and built_in.fused
        assert not without_kernels(replace(built_in, kept=torch.relu)).fused


def test_the_fused_kernel_leaves_layers_without_rotation_to_pytorch() -> None:
    types = {"layer_types": {"nope": {"pos_emb": "none"}}, "attention_config": [[["global", "nope"], 1]]}
    keys = {"pos_emb": "coca", "operand_kernel": "triton", "num_layers": 2}
    method = build_methods(load_config([], SHAPE | keys | types))["nope"]
    q = torch.randn(1, 2, 3, 16)
    frame = PositionEncoding(method)(torch.arange(3), 3, q.dtype)
    assert method.prepare(q, q, q, frame).query is q


def test_a_named_backend_is_never_replaced() -> None:
    with pytest.raises(BackendError, match=r"flex cannot compute this model .*CUDA.; set another"):
        select_backend("flex", Needs("cpu"))
    with pytest.raises(BackendError, match="flex"):
        build_model(load_config([], SHAPE | {"pos_emb": "rotary", "attention_backend": "flex"}))


def test_the_configuration_knows_exactly_these() -> None:
    choices = PositionConfig.model_fields["attention_backend"].annotation
    assert set(choices.__args__) == {"auto", *BACKENDS}  # type: ignore[union-attr]


def needs_of(**keys: Any) -> Needs:
    """The needs of a model on CUDA with these keys."""
    config = load_config([], SHAPE | {"pos_emb": "rotary"} | keys)
    return build_method(config.position, config.model).needs("cuda", config.model.attention_dropout)


def outline(needs: Needs) -> tuple[Any, ...]:
    """All that decides about a row of the page: lengths of windows do not."""
    bands = [(band.low > 0, *(end is None for end in (band.high, band.first_keys, band.chunk))) for band in needs.bands]
    return needs.device_type, needs.bias, needs.dropout > 0, bands


def row(choice: str, key: str) -> Needs:
    """The needs in the first row of the page that names the choice of the key."""
    return next(needs for label, needs in NEEDS.items() if label.startswith(f"`{key}: ") and f"{choice}`" in label)


@pytest.mark.parametrize("pos_emb", methods.names("pos_emb"))
def test_the_page_knows_every_method(pos_emb: str) -> None:
    assert outline(needs_of(pos_emb=pos_emb)) == outline(row(pos_emb, "pos_emb"))


@pytest.mark.parametrize("kind", methods.names("relative_positions"))
def test_the_page_knows_every_map(kind: str) -> None:
    wanted = {"window": 8, "chunk_size": 8, "target_length": 64}
    known = (option.name for option in methods.find("relative_positions", kind).options)
    given = {name: wanted[name] for name in known if name in wanted}
    assert outline(needs_of(relative_positions={"type": kind} | given)) == outline(row(kind, "relative_positions"))


def test_the_page_knows_a_window_alone() -> None:
    shown = outline(NEEDS["`sliding_window_width`, or `relative_positions: streaming` with `sinks: 0`"])
    assert outline(needs_of(relative_positions={"type": "streaming", "window": 8, "sinks": 0})) == shown
    assert outline(needs_of(sliding_window_width=7)) == shown
    biased = outline(NEEDS["`sliding_window_width` with `alibi`"])
    assert outline(needs_of(pos_emb="alibi", sliding_window_width=7)) == biased


def test_what_the_page_leaves_out_cannot_train_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs, "runtime", SimpleNamespace(interpret=False))
    for name in BACKENDS:
        assert (BACKENDS[name].supports(Needs("cpu")) is None) == (name in CPU_COLUMNS)


def test_the_page_promises_no_more_than_supports() -> None:
    """A reason that does not depend on the machine is the same on every machine."""
    for name, backend in BACKENDS.items():
        for needs in NEEDS.values():
            if BACKENDS[name].supports(needs) is not None:
                assert backend.supports(needs) is not None


def test_a_model_for_evaluation_needs_no_dropout_and_no_map_of_training() -> None:
    mapped = SHAPE | {"pos_emb": "rotary", "attention_dropout": 0.1}
    for relative in ({"type": "rerope"}, {"type": "inv_leaky_rerope", "target_length": 64}):
        config = load_config([], mapped | {"relative_positions": relative})
        with pytest.raises(BackendError, match="cannot share a dropout mask"):
            build_model(config)
        build_model(config, training=False)
    assert build_method(config.position, config.model).needs("cpu", 0.1, training=False) == Needs("cpu", 16)


@pytest.mark.parametrize("backend", [MergeBackend(), FlexBackend(compiled=False)])
def test_dropout_that_a_backend_has_not_is_an_error(backend: Backend) -> None:
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="dropout.*; build the model"):
        backend.attend(AttentionInputs((Segment(x, x, CAUSAL),), x, 0.3, dropout=0.1))
