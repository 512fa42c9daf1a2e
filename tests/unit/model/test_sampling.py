"""Sampling: the distribution of draws, the filters against transformers', and the seeds of samples."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatron_coca.config import load_config
from megatron_coca.model import GPT, Sampling, build_model, generate, generate_tokens, row_seeds
from megatron_coca.model.generate import draw, penalized, uniform_draws
from tests.unit.model.stand_in import StandIn

VOCABULARY = 40
SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 16,
    "vocab_size": VOCABULARY,
    "make_vocab_size_divisible_by": 64,
    "pos_emb": "coca",
}
WARM = Sampling(temperature=1.0, seed=3)


def random_model(**keys: Any) -> GPT:
    model = build_model(load_config([], SHAPE | keys), training=False).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def prompts(batch: int = 4, length: int = 12) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))


class Fixed(StandIn):
    """A model with the same logits at every step."""

    def __init__(self, logits: list[float]) -> None:
        self._logits = torch.tensor(logits)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits.expand(len(hidden), -1)


def test_the_share_of_draws_is_the_probability() -> None:
    """Over a grid of uniform numbers, every token exactly as often as its probability, but for the grid's step."""
    probabilities, count = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05, 0.0]), 1000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = draw(probabilities.log().expand(count, -1), uniform)
    found = torch.bincount(tokens[:, 0], minlength=6) / count
    assert tokens.shape == (count, 1) and torch.allclose(found, probabilities, atol=1.5 / count)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-40])
def test_the_ends_of_the_interval_are_tokens_with_a_probability(uniform: float) -> None:
    scores = torch.tensor([[-torch.inf, 0.0, -1.0, -torch.inf]])
    assert int(draw(scores, torch.tensor([uniform], dtype=torch.float64))) == (1 if uniform == 0 else 2)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.8)]
)
def test_samples_have_the_distribution_of_the_logits(temperature: float, top_k: int, top_p: float) -> None:
    """Pearson's test over rows and steps. Closed form: softmax(logits / T) over the tokens kept, renormalised."""
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    weights = np.exp(logits / temperature)
    weights[{3: 3, 0: 4}[top_k] :] = 0
    if top_p == 0.8:
        weights[3] = 0  # 0.4 and 0.3 stay below 0.8, 0.2 reaches it
    sampling = Sampling(temperature, top_k, top_p, seed=1)
    found = generate(Fixed(logits.tolist()), torch.zeros(500, 1, dtype=torch.int64), 8, sampling=sampling)
    counts = np.bincount(found.flatten().numpy(), minlength=4)
    kept = weights > 0
    assert counts[~kept].sum() == 0
    assert chisquare(counts[kept], weights[kept] / weights.sum() * counts.sum()).pvalue > 0.01


PROCESSED = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.6},
    {"top_k": 7, "top_p": 0.5, "temperature": 1.5},
    {"repetition_penalty": 1.4, "top_k": 4, "top_p": 0.9, "temperature": 0.3},
    {"repetition_penalty": 0.8, "top_p": 0.05},
]


@pytest.mark.parametrize("settings", PROCESSED, ids=str)
def test_filters_are_those_of_transformers(settings: dict[str, Any]) -> None:
    sampling = Sampling(**({"temperature": 1.0} | settings))
    generator = torch.Generator().manual_seed(5)
    logits, ids = 3 * torch.randn(6, VOCABULARY, generator=generator), prompts(6)
    logits[0, 1:9] = logits[0].max()  # equal logits at the border of top_k and top_p
    theirs = LogitsProcessorList()
    for name, processor in (
        ("repetition_penalty", RepetitionPenaltyLogitsProcessor),
        ("temperature", TemperatureLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
    ):
        theirs += [processor(settings[name])] if name in settings else []
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    ours = sampling.filtered(penalized(logits, seen, sampling.repetition_penalty))
    wanted = theirs(ids, logits.clone())
    rows = slice(1, None) if "top_p" in settings else slice(None)  # of equal tokens top_p keeps any
    torch.testing.assert_close(ours[rows].softmax(-1), wanted[rows].softmax(-1), rtol=1e-5, atol=1e-7)
    assert torch.equal(ours[rows].isinf(), wanted[rows].isinf())
    assert torch.equal(ours.isinf().sum(-1), wanted.isinf().sum(-1))


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-30}])
def test_narrow_settings_take_the_likeliest_token(settings: dict[str, Any]) -> None:
    model, ids = random_model(), prompts()
    narrow = Sampling(**({"temperature": 1.0} | settings))
    assert torch.equal(generate(model, ids, 8, sampling=narrow), generate(model, ids, 8))


@pytest.mark.parametrize("settings", [{"top_k": VOCABULARY}, {"top_k": 1000}, {"top_p": 1.0}])
def test_wide_settings_change_nothing(settings: dict[str, Any]) -> None:
    model, ids = random_model(), prompts()
    wide = Sampling(temperature=1.0, seed=3, **settings)
    assert torch.equal(generate(model, ids, 8, sampling=wide), generate(model, ids, 8, sampling=WARM))


def test_a_repetition_penalty_without_sampling() -> None:
    """The largest logit is never repeated while others are within the penalty; tokens of the prompt count."""
    model = Fixed([3.0, 2.9, 2.8, -1.0, -1.2])
    found = generate(model, torch.tensor([[1, 1]]), 4, sampling=Sampling(repetition_penalty=1.5))
    assert found.tolist() == [[0, 2, 0, 0]], "1 was in the prompt, 2 falls to 1.87 after it is used, 0 to 2.0"
    negative = generate(Fixed([-1.0, -1.2]), torch.tensor([[0]]), 1, sampling=Sampling(repetition_penalty=1.5))
    assert negative.tolist() == [[1]], "negative logits are multiplied"


def test_a_seed_gives_one_sample_and_another_seed_another() -> None:
    model, ids = random_model(), prompts()
    first = generate(model, ids, 12, sampling=WARM)
    state = torch.random.get_rng_state()
    assert torch.equal(generate(model, ids, 12, sampling=WARM), first)
    assert torch.equal(torch.random.get_rng_state(), state), "the global random state is not used"
    assert torch.equal(generate(model, ids, 5, sampling=WARM), first[:, :5]), "a longer one begins alike"
    assert not torch.equal(generate(model, ids, 12, sampling=Sampling(1.0, seed=4)), first)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    model, ids = random_model(), prompts(5)
    together = generate(model, ids, 12, sampling=WARM)
    alone = torch.cat([generate(model, row[None], 12, sampling=WARM) for row in ids])
    assert torch.equal(together, alone)
    assert torch.equal(generate(model, ids.flip(0), 12, sampling=WARM).flip(0), together)


def test_equal_prompts_have_samples_of_their_own() -> None:
    model, ids = random_model(), prompts(1).expand(6, -1)
    found = generate(model, ids, 12, sampling=WARM)
    assert len(set(map(tuple, found.tolist()))) == 6
    assert torch.equal(found[:2], generate(model, ids[:2], 12, sampling=WARM))
    assert row_seeds([[1, 2], [3], [1, 2]], 0)[:2] == row_seeds([[1, 2], [3]], 0)
    assert len(set(row_seeds([[1, 2], [3], [1, 2], [1], [12]], 0) + row_seeds([[1, 2]], 1))) == 6


def test_the_padding_of_the_vocabulary_is_never_drawn() -> None:
    model = random_model()
    with torch.no_grad():
        model.embedding.word_embeddings.weight[VOCABULARY:] *= 100
    assert generate(model, prompts(), 20, sampling=Sampling(5.0)).max() < VOCABULARY


def test_uniform_numbers() -> None:
    numbers = uniform_draws(row_seeds([[row] for row in range(200)], 0), 50)
    assert numbers.shape == (200, 50) and numbers.dtype == torch.float64
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(float(numbers.mean()) - 0.5) < 5 / (12 * 10_000) ** 0.5
    assert abs(float(torch.corrcoef(numbers[:2])[0, 1])) < 0.5, "rows are not copies of one another"


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": 1e-320},
        {"repetition_penalty": 1e-320},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"repetition_penalty": 0.0},
        {"seed": -1},
    ],
    ids=str,
)
def test_values_outside_their_range_are_errors(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}: .* is out of range"):
        Sampling(**settings)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(value: float) -> None:
    with pytest.raises(FloatingPointError, match="float32 overflowed"):
        generate(Fixed([0.0, value, 1.0]), torch.tensor([[0]]), 1, sampling=WARM)


def test_tokens_come_one_step_at_a_time() -> None:
    model, ids = random_model(), prompts()
    steps: Iterator[Tensor] = generate_tokens(model, ids, 10, sampling=WARM)
    first = [next(steps), next(steps)]
    assert torch.equal(torch.stack(first, dim=1), generate(model, ids, 10, sampling=WARM)[:, :2])
