"""Sliding-window perplexity against a token-by-token float64 computation that knows nothing of batches or plans."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron_coca.evaluation import EvaluationError, sliding_window_perplexity
from megatron_coca.evaluation.tasks.perplexity import measure as perplexity
from megatron_coca.evaluation.tasks.perplexity.measure import plan_windows, pooled, window_count
from megatron_coca.evaluation.tasks.perplexity.task import DocumentScore

VOCABULARY = 31


class CausalMean(nn.Module):
    """The mean of all embeddings so far, weighted by the position: the result depends on the whole window."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, 16, generator=generator, dtype=dtype))
        self.head = nn.Parameter(torch.randn(VOCABULARY, 16, generator=generator, dtype=dtype))
        self.lengths: set[int] = set()
        self.most_logits = 0

    def hidden_states(self, input_ids: Tensor, *, last: int | None = None) -> Tensor:
        length = input_ids.shape[1]
        self.lengths.add(length)
        weight = torch.arange(1, length + 1, dtype=self.embedding.dtype)
        hidden = self.embedding[input_ids] * weight.cos()[:, None]
        return (hidden.cumsum(1) / weight[:, None].sqrt())[:, -(last or length) :]

    def logits(self, hidden: Tensor) -> Tensor:
        self.most_logits = max(self.most_logits, hidden.shape[0])
        return hidden @ self.head.T


def documents(*lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, VOCABULARY, length, dtype=np.int64) for length in lengths]


def nll_of_token(model: CausalMean, context: np.ndarray, token: int) -> float:
    with torch.no_grad():
        logits = model.logits(model.hidden_states(torch.from_numpy(context)[None])[0, -1:])
    return -torch.log_softmax(logits.double(), -1)[0, token].item()


def contexts_by_definition(length: int, window: int, stride: int) -> dict[int, tuple[int, int]]:
    """Scored token -> the tokens from which it is predicted: those before it in its window."""
    contexts = {token: (0, token) for token in range(1, window)}
    group = 0
    while len(contexts) < length - 1:
        tokens = range(window + group * stride, min(window + (group + 1) * stride, length))
        contexts |= {token: (tokens[-1] - window, token) for token in tokens}
        group += 1
    return contexts


def test_accuracy_counts_the_likeliest_tokens(model: CausalMean) -> None:
    arrays = documents(23, 31)
    found = sliding_window_perplexity(model, arrays, [8], 5, progress=False)[0]
    with torch.no_grad():
        right = [
            int(model.logits(model.hidden_states(torch.from_numpy(tokens[first:token])[None])[0, -1]).argmax())
            == tokens[token]
            for tokens in arrays
            for token, (first, _) in contexts_by_definition(len(tokens), 8, 5).items()
        ]
    assert 0 < sum(right) < len(right)
    assert sum(found.correct_by_document) == sum(right) and found.accuracy == pytest.approx(sum(right) / len(right))


def brute_force(model: CausalMean, arrays: list[np.ndarray], window: int, stride: int) -> tuple[float, int]:
    values = [
        nll_of_token(model, tokens[first:token], int(tokens[token]))
        for tokens in arrays
        for token, (first, _) in contexts_by_definition(len(tokens), window, stride).items()
    ]
    return math.fsum(values) / len(values), len(values)


@pytest.fixture
def model() -> CausalMean:
    return CausalMean().eval()


@pytest.mark.parametrize("stride", [1, 5, 8])
def test_equals_brute_force(model: CausalMean, stride: int) -> None:
    arrays, windows = documents(40, 53, 47), [8, 11, 16, 39, 40]
    results = sliding_window_perplexity(model, arrays, windows, stride, tokens_per_batch=64, progress=False)
    for result, window in zip(results, windows, strict=True):
        nll, count = brute_force(model, arrays, window, stride)
        assert (result.window, result.tokens_scored, result.documents) == (window, count, 3)
        assert result.nll == pytest.approx(nll, abs=1e-6)
        assert result.perplexity == pytest.approx(math.exp(nll), rel=1e-6)
    assert max(result.nll for result in results) - min(result.nll for result in results) > 1e-3


@pytest.mark.parametrize("length", [16, 17, 31, 32, 33, 64, 101])
@pytest.mark.parametrize(("window", "stride"), [(2, 1), (4, 4), (7, 3), (16, 5), (16, 16)])
def test_every_window_scores_the_same_tokens(length: int, window: int, stride: int) -> None:
    plan = plan_windows(length, window, stride)
    assert [token for each in plan for token in range(each.first_scored, each.end)] == list(range(1, length))
    assert plan[-1].end == length and len(plan) == window_count(length, window, stride)
    for each in plan:
        assert 0 <= each.start < each.first_scored and each.start + window <= length
        assert each.end - 1 <= each.start + window, "the last scored token is predicted from inside the window"
    for each in plan[1:]:
        assert each.tokens_scored <= stride and each.first_scored - each.start >= window - stride + 1


def test_dynamic_extension_sees_the_window_and_the_head_only_scored_positions(
    model: CausalMean, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(perplexity.LOGITS_AT_ONCE, "cpu", 6 * VOCABULARY)
    expected, _ = brute_force(model, documents(45), 20, 4)
    model.lengths.clear()
    model.most_logits = 0
    result = sliding_window_perplexity(model, documents(45), [20], 4, tokens_per_batch=60, progress=False)[0]
    assert model.lengths == {20}
    assert model.most_logits == 6
    assert result.nll == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("tokens_per_batch", [1, 24, 100, 10**6])
def test_batch_size_does_not_matter(tokens_per_batch: int) -> None:
    model, arrays = CausalMean(torch.float32).eval(), documents(48, 61, 90)
    expected = sliding_window_perplexity(model, arrays, [12, 24], 6, progress=False)
    got = sliding_window_perplexity(model, arrays, [12, 24], 6, tokens_per_batch=tokens_per_batch, progress=False)
    for one, other in zip(got, expected, strict=True):
        assert one.nll == pytest.approx(other.nll, abs=1e-6)


def test_order_of_windows_and_documents_changes_nothing() -> None:
    model, arrays = CausalMean(torch.float32).eval(), documents(48, 61, 90)
    forward = sliding_window_perplexity(model, arrays, [12, 24, 48], 6, tokens_per_batch=70, progress=False)
    backward = sliding_window_perplexity(model, arrays[::-1], [48, 24, 12], 6, tokens_per_batch=70, progress=False)
    assert [result.nll for result in forward] == [result.nll for result in backward[::-1]]


def test_the_standard_error_computed_by_hand() -> None:
    """14 nats over 6 tokens: the residuals are 10 - 4 * 7/3 = 2/3 and 4 - 2 * 7/3 = -2/3."""
    result = pooled(8, [DocumentScore(10.0, 3), DocumentScore(4.0, 1)], [5, 3])
    assert result.nll == pytest.approx(7 / 3) and result.accuracy == pytest.approx(4 / 6)
    assert result.nll_stderr == pytest.approx((8 / 9 / (2 * 1)) ** 0.5 / (6 / 2))
    assert pooled(8, [DocumentScore(10.0, 3)], [5]).nll_stderr is None


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_stored_dtype_does_not_matter(model: CausalMean, dtype: type) -> None:
    expected = sliding_window_perplexity(model, documents(30), [10], 5, progress=False)[0]
    got = sliding_window_perplexity(model, [documents(30)[0].astype(dtype)], [10], 5, progress=False)[0]
    assert got.nll == expected.nll


def test_overflow_is_infinite(model: CausalMean) -> None:
    with torch.no_grad():
        model.head *= 1e5
    result = sliding_window_perplexity(model, documents(30), [10], 5, progress=False)[0]
    assert result.nll > 709 and result.perplexity == math.inf


@pytest.mark.parametrize(
    ("windows", "stride", "lengths", "message"),
    [
        ([16], 32, (64,), "window 16: is shorter than the stride 32"),
        ([16, 65], 8, (70, 64), "window 65: is longer than document 1, which has 64 tokens"),
        ([16], 0, (64,), "stride: must be at least 1"),
        ([1], 1, (64,), "window 1"),
        ([], 8, (64,), "windows: none given"),
        ([16], 8, (), "documents: none given"),
        ([16, 16], 8, (64,), "duplicate size"),
    ],
)
def test_bad_numbers_are_named(
    model: CausalMean, windows: list[int], stride: int, lengths: tuple[int, ...], message: str
) -> None:
    with pytest.raises(EvaluationError, match=message):
        sliding_window_perplexity(model, documents(*lengths), windows, stride, progress=False)


def test_training_mode_is_an_error(model: CausalMean) -> None:
    with pytest.raises(ValueError, match="training mode"):
        sliding_window_perplexity(model.train(), documents(30), [10], 5, progress=False)


def test_a_token_left_out_is_noticed(model: CausalMean, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "plan_windows", lambda *args: plan_windows(*args)[:-1])
    with pytest.raises(RuntimeError, match="24 tokens were scored instead of 29"):
        sliding_window_perplexity(model, documents(30), [10], 5, progress=False)


def test_a_vocabulary_leaves_out_the_other_tokens(model: CausalMean) -> None:
    arrays = [tokens % 20 for tokens in documents(23)]
    found = sliding_window_perplexity(model, arrays, [8], 5, vocabulary=20, progress=False)[0]
    with torch.no_grad():
        expected = [
            -torch.log_softmax(
                model.logits(model.hidden_states(torch.from_numpy(arrays[0][first:token])[None])[0, -1])[:20].double(),
                -1,
            )[arrays[0][token]].item()
            for token, (first, _) in contexts_by_definition(23, 8, 5).items()
        ]
    assert found.nll == pytest.approx(np.mean(expected), abs=1e-6)
    assert found.nll < sliding_window_perplexity(model, arrays, [8], 5, progress=False)[0].nll


def test_a_vocabulary_without_a_token_of_the_documents_is_an_error(model: CausalMean) -> None:
    with pytest.raises(EvaluationError, match="vocabulary 5: the documents contain the token id 9"):
        sliding_window_perplexity(model, [np.arange(10)], [8], 5, vocabulary=5, progress=False)
