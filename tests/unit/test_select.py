"""The choice of an attention backend: what is taken, what is passed over and why, and what is refused."""

import logging

import pytest

from megatron_coca.attention.backends.select import AUTOMATIC, BACKENDS, BackendError, select_backend
from megatron_coca.attention.inputs import Band, Needs
from megatron_coca.config import load_config
from megatron_coca.config.position import PositionConfig
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
    assert f"attention backend {expected}" in caplog.text
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
