"""Greedy generation: the token that is taken, the end of a row, ids that are never generated, invalid arguments."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca.config import load_config
from megatron_coca.model import GPT, NOT_GENERATED, build_model, generate
from tests.unit.model.stand_in import StandIn

SHAPE = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 16,
    "vocab_size": 50,
    "make_vocab_size_divisible_by": 64,
    "pos_emb": "coca",
}


def make(**keys: Any) -> GPT:
    return build_model(load_config([], SHAPE | keys)).eval()


def prompts(batch: int = 3, length: int = 20) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(0))


class Counting(StandIn):
    """Gives the next number after each token, and counts the positions that it was asked for logits of."""

    def __init__(self, size: int = 100) -> None:
        self.size, self.asked = size, 0

    def logits(self, hidden: Tensor) -> Tensor:
        self.asked += hidden[..., 0].numel()
        return -(torch.arange(self.size) - hidden - 1).abs()


def test_a_row_ends_where_it_says_and_is_filled_behind_its_last_token() -> None:
    answers = generate(Counting(), torch.tensor([[1, 5], [9, 7], [3, 0]]), 5, finished=lambda ids: ids[-1] in (8, 2))
    assert answers.tolist() == [[6, 7, 8, -1, -1], [8, -1, -1, -1, -1], [1, 2, -1, -1, -1]]
    assert NOT_GENERATED == -1
    assert answers.dtype == torch.int64


def test_generation_stops_when_every_row_has_ended() -> None:
    model = Counting()
    generate(model, torch.tensor([[1], [2]]), 50, finished=lambda ids: len(ids) == 3)
    assert model.asked == 2 * 3


def test_logits_are_computed_of_the_last_position_alone() -> None:
    model = Counting()
    generate(model, torch.zeros(4, 1000, dtype=torch.int64), 3)
    assert model.asked == 4 * 3


def test_the_padding_of_the_vocabulary_is_never_generated() -> None:
    model = make()
    with torch.no_grad():
        model.embedding.word_embeddings.weight[50:] *= 1000  # tied: their logits are the largest, or the smallest
    answers = generate(model, prompts(batch=16), 8)
    assert answers.min() >= 0 and answers.max() < 50
    whole = model.logits(model.hidden_states(prompts(batch=16)))[:, -1].argmax(-1)
    assert (whole >= 50).any(), "the padding would have been taken"
    assert generate(model, prompts(batch=16), 8, vocab_size=7).max() < 7


def test_prompts_and_weights_stay_as_they_are() -> None:
    model, ids = make(), prompts()
    before, weights = ids.clone(), copy.deepcopy(model.state_dict())
    first = generate(model, ids, 4)
    assert torch.equal(ids, before) and torch.equal(generate(model, ids, 4), first)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("ids", "number", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), 4, r"int64 \[batch, length\]"),
        (torch.zeros(1, 0, dtype=torch.int64), 4, r"\[1, 0\]"),
        (torch.zeros(1, 3), 4, "torch.float32"),
        (torch.zeros(1, 3, dtype=torch.int64), 0, "max_new_tokens: must be at least 1, not 0"),
    ],
)
def test_wrong_prompts_are_errors(ids: Tensor, number: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(make(), ids, number)


def test_an_unknown_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="dynamic_length: .*'longest'; .*current, prompt, total"):
        generate(make(), prompts(), 4, dynamic_length="longest")  # type: ignore[arg-type]


def test_a_model_in_training_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match="model.eval"):
        generate(make().train(), prompts(), 4)


def test_logits_that_are_not_numbers_are_an_error() -> None:
    model = make()
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="float32 overflowed"):
        generate(model, prompts(), 4)


def test_a_model_with_a_table_of_positions_generates_up_to_its_last_position_and_no_further() -> None:
    model = make(pos_emb="learned", max_position_embeddings=24)
    assert generate(model, prompts(length=20), 5).shape == (3, 5), "the last token is not read"
    with pytest.raises(ValueError, match="24 learned positions"):
        generate(model, prompts(length=20), 6)
