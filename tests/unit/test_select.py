"""The choice of an attention backend: what is taken, what is passed over and why, and what is refused."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from megatron_coca.attention.backends.flex import FlexBackend
from megatron_coca.attention.backends.merge import MergeBackend
from megatron_coca.attention.build import (
    AUTOMATIC,
    BACKENDS,
    CPU_COLUMNS,
    NEEDS,
    SUMMARIES,
    BackendError,
    build_method,
    page,
    refusal,
    select_backend,
)
from megatron_coca.attention.inputs import AttentionInputs, Backend, Band, Needs, Segment
from megatron_coca.config import load_config
from megatron_coca.config.model import MapType, PositionConfig, PositionMethod
from megatron_coca.model import build_model

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
        (Needs("cuda", bands=NEAR_AND_FAR), "merge"),
        (Needs("cuda", bias="log"), "flex"),
    ],
)
def test_automatic_choice(needs: Needs, expected: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="megatron_coca"):
        name, backend = select_backend("auto", needs)
    assert (name, backend) == (expected, BACKENDS[expected])
    assert (f"attention backend {expected}; not" in caplog.text) == (AUTOMATIC[0] != expected)
    for candidate in AUTOMATIC[: AUTOMATIC.index(expected)]:
        assert f"not {candidate}: {BACKENDS[candidate].supports(needs)}" in caplog.text


def test_what_is_taken_only_by_name() -> None:
    assert not {"reference", "flash", "triton"} & set(AUTOMATIC)
    needs = Needs("cuda", bias="linear", dropout=0.1)
    with pytest.raises(BackendError) as caught:
        select_backend("auto", needs)
    for part in (
        "sdpa: off the CPU",
        "merge: its calls take no mask",
        "flex: FlexAttention has no dropout",
        "attention_backend: reference runs anything",
    ):
        assert part in str(caught.value)
    assert select_backend("reference", needs) == ("reference", BACKENDS["reference"])


def test_a_named_backend_is_never_replaced() -> None:
    with pytest.raises(
        BackendError, match=r"flex cannot serve this model; not flex: .*CUDA; set attention_backend to another"
    ):
        select_backend("flex", Needs("cpu"))
    with pytest.raises(BackendError, match="flex"):
        build_model(load_config([], SHAPE | {"pos_emb": "rotary", "attention_backend": "flex"}))


def test_the_configuration_knows_exactly_these() -> None:
    choices = PositionConfig.model_fields["attention_backend"].annotation
    assert set(choices.__args__) == {"auto", *BACKENDS}  # type: ignore[union-attr]


def needs_of(**keys: Any) -> Needs:
    """What a model on CUDA with these keys asks for."""
    config = load_config([], SHAPE | {"pos_emb": "rotary"} | keys)
    return build_method(config.position, config.model).needs("cuda", config.model.attention_dropout)


def outline(needs: Needs) -> tuple[Any, ...]:
    """All that decides about a row of the page: lengths of windows do not."""
    bands = [(band.low > 0, band.high is None, band.first_keys is None) for band in needs.bands]
    return needs.device_type, needs.bias, needs.dropout > 0, bands


def row(choice: str, key: str) -> Needs:
    """The needs in the first row of the page that names the choice of the key."""
    return next(needs for label, needs in NEEDS.items() if label.startswith(f"`{key}: ") and f"{choice}`" in label)


@pytest.mark.parametrize("pos_emb", get_args(PositionMethod))
def test_the_page_knows_every_method(pos_emb: str) -> None:
    assert outline(needs_of(pos_emb=pos_emb)) == outline(row(pos_emb, "pos_emb"))


@pytest.mark.parametrize("kind", get_args(MapType))
def test_the_page_knows_every_map(kind: str) -> None:
    given = {"type": kind, "window": 8} | ({"target_length": 64} if kind == "inv_leaky_rerope" else {})
    assert outline(needs_of(relative_positions=given)) == outline(row(kind, "relative_positions"))


def test_the_page_knows_a_window_alone() -> None:
    given = {"type": "streaming", "window": 8, "sinks": 0}
    assert outline(needs_of(relative_positions=given)) == outline(
        row("streaming` with `sinks: 0", "relative_positions")
    )


def test_the_page_is_what_the_backends_say() -> None:
    """Write it anew with: python -m megatron_coca.attention.build > docs/backends.md"""
    pytest.importorskip("triton")
    written = Path(__file__).parents[2].joinpath("docs", "backends.md").read_text()
    assert page() == written
    assert set(SUMMARIES) == set(BACKENDS)


def test_what_the_page_leaves_out_cannot_train_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs, "runtime", SimpleNamespace(interpret=False))
    for name in BACKENDS:
        assert (refusal(name)(Needs("cpu")) is None) == (name in CPU_COLUMNS)


def test_the_page_promises_no_more_than_supports() -> None:
    """What it says without looking at the machine, a backend says on any machine."""
    for name, backend in BACKENDS.items():
        for needs in NEEDS.values():
            if refusal(name)(needs) is not None:
                assert backend.supports(needs) is not None


def test_a_model_for_evaluation_needs_no_dropout_and_no_map_of_training() -> None:
    mapped = SHAPE | {"pos_emb": "rotary", "attention_dropout": 0.1}
    for relative in ({"type": "rerope"}, {"type": "inv_leaky_rerope", "target_length": 64}):
        config = load_config([], mapped | {"relative_positions": relative})
        with pytest.raises(BackendError, match="share no random state"):
            build_model(config)
        build_model(config, training=False)
    assert build_method(config.position, config.model).needs("cpu", 0.1, training=False) == Needs("cpu", 16)


@pytest.mark.parametrize("backend", [MergeBackend(), FlexBackend(compiled=False)])
def test_dropout_that_a_backend_has_not_is_an_error(backend: Backend) -> None:
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="dropout; build the model"):
        backend.attend(AttentionInputs((Segment(x, x),), x, 0.3, dropout=0.1))
