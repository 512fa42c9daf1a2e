"""The loss: its value, its gradients and its memory, a few tokens at a time or over all logits at once."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_coca.config import load_config
from megatron_coca.model import LanguageModelLoss, build_model, next_token_loss
from megatron_coca.model.loss import IGNORED, _even_chunk, linear_cross_entropy

TOKENS, WIDTH, WORDS = 70, 24, 130
CHUNKS = (1, 16, 64, 70, 1000)
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 90}


def operands(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weights and labels, some of which are ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    weight = (0.5 * torch.randn(WORDS, WIDTH, generator=generator)).to(dtype)
    labels = torch.randint(WORDS, (TOKENS,), generator=generator)
    labels[::7] = IGNORED
    return hidden, weight, labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The loss that PyTorch computes over all logits."""
    return next_token_loss(hidden @ weight.T, labels.clamp(min=0), labels != IGNORED)


def results(loss: Any, hidden: Tensor, weight: Tensor, labels: Tensor, factor: float = 1.0) -> list[Tensor]:
    """The loss times a factor, and both gradients, in float64."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    value = loss(hidden, weight, labels)
    (factor * value).backward()
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.dtype == hidden.dtype and weight.grad.dtype == weight.dtype
    return [factor * value.detach().double(), hidden.grad.double(), weight.grad.double()]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 1.0 / 3, 1024.0])
def test_chunks_err_no_more_than_all_logits_at_once(chunk: int, dtype: torch.dtype, factor: float) -> None:
    """Compare with float64: at most twice the plain error in the same precision. Accumulation or loss scaling multiply
    the loss by `factor`.
    """
    given = operands(dtype)
    exact = results(plain, given[0].double(), given[1].double(), given[2], factor)
    whole = results(plain, *given, factor)
    parts = results(lambda *each: linear_cross_entropy(*each, chunk), *given, factor)
    for name, truth, there, here in zip(("loss", "hidden", "weight"), exact, whole, parts, strict=True):
        allowed = 2 * (there - truth).norm() + 8 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * (
            truth.norm()
        )
        assert (here - truth).norm() <= allowed, name


def test_no_label_counts() -> None:
    hidden, weight, labels = operands(torch.float32)
    for each in results(lambda *given: linear_cross_entropy(*given, 16), hidden, weight, labels.fill_(IGNORED)):
        assert not each.any()


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_one_of_the_operands_may_be_fixed(trained: str) -> None:
    hidden, weight, labels = operands(torch.float32)
    leaf = (hidden if trained == "hidden" else weight).requires_grad_()
    linear_cross_entropy(hidden, weight, labels, 16).backward()
    (part,) = torch.autograd.grad(plain(hidden, weight, labels), leaf)
    torch.testing.assert_close(leaf.grad, part)


@torch.no_grad()
def test_evaluation_gives_the_same_value_and_no_gradient() -> None:
    hidden, weight, labels = operands(torch.float32)
    loss = linear_cross_entropy(hidden, weight.requires_grad_(), labels, 16)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(hidden, weight, labels))


def test_backward_may_run_twice() -> None:
    hidden, weight, labels = operands(torch.float32)
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, labels, 16)
    first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_compiled_loss_is_the_same() -> None:
    given = operands(torch.float32)
    compiled = torch.compile(lambda *each: linear_cross_entropy(*each, 32), backend="aot_eager")
    for one, other in zip(
        results(compiled, *given), results(lambda *each: linear_cross_entropy(*each, 32), *given), strict=True
    ):
        torch.testing.assert_close(one, other)


class Largest(TorchDispatchMode):
    """The largest number of elements of any tensor that an operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [each.untyped_storage().nbytes() // each.element_size() for each in tree_leaves(out) if _dense(each)]
        self.elements = max([self.elements, *sizes])
        return out


def _dense(value: Any) -> bool:
    return isinstance(value, Tensor)


@pytest.mark.parametrize("chunk", [8, 32])
def test_no_tensor_is_larger_than_a_chunk_of_logits(chunk: int) -> None:
    hidden, weight = torch.randn(512, 4).requires_grad_(), torch.randn(2000, 4).requires_grad_()
    with Largest() as seen:
        linear_cross_entropy(hidden, weight, torch.randint(2000, (512,)), chunk).backward()
    assert seen.elements == max(chunk * 2000, 2000 * 4)


def test_peak_memory_follows_the_chunk() -> None:
    hidden, weight = torch.randn(2048, 8).requires_grad_(), torch.randn(4000, 8).requires_grad_()
    labels = torch.randint(4000, (2048,))
    peaks = {chunk: _peak(lambda c=chunk: linear_cross_entropy(hidden, weight, labels, c)) for chunk in (64, 256)}
    whole = _peak(lambda: plain(hidden, weight, labels))
    row = 4 * 4000
    assert peaks[64] < 4 * 64 * row < peaks[256] < 4 * 256 * row < whole
    assert whole > 2 * 2048 * row


def _peak(forward: Any) -> int:
    """The most bytes that were held at once during forward and backward."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        forward().backward()
    held = most = 0
    for event in sorted(run.profiler.kineto_results.events(), key=lambda each: each.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


HEADS = {"plain": {}, "narrow": {"embedding_width": 8}, "transformed": {"use_output_transform": True}}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_models_loss_is_that_of_its_logits(untied: bool, masked: bool, head: str) -> None:
    keys = SHAPE | {"make_vocab_size_divisible_by": 16, "no_weight_tying": untied, "init_method_std": 0.3}
    keys |= HEADS[head] | {"use_bias_in_output_head": head != "plain"}
    samples = torch.randint(90, (3, 17), generator=torch.Generator().manual_seed(0))
    mask = torch.rand(3, 16, generator=torch.Generator().manual_seed(1)) > 0.4 if masked else None
    found = {}
    for chunk in (0, 7):
        model = build_model(load_config([], keys | {"pos_emb": "coca", "loss_chunk_size": chunk}))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name in ("final_bias", "final_linear.bias"):
                    weight.copy_(torch.linspace(-1, 1, len(weight)))
        loss = LanguageModelLoss(model)(samples, loss_mask=mask)
        loss.backward()
        found[chunk] = {"loss": loss} | {name: each.grad for name, each in model.named_parameters()}
        torch.testing.assert_close(loss, next_token_loss(model(samples[:, :-1]), samples[:, 1:], mask))
    assert found[7].keys() == found[0].keys() and any("word_embeddings" in name for name in found[7])
    for name, each in found[0].items():
        torch.testing.assert_close(found[7][name], each, rtol=1e-4, atol=1e-6, msg=name)


def test_accumulated_gradients_add_up() -> None:
    """Half the loss, twice, is the loss: as DeepSpeed accumulates."""
    model = build_model(load_config([], SHAPE | {"pos_emb": "rotary", "loss_chunk_size": 5}))
    twice, samples = copy.deepcopy(model), torch.randint(90, (2, 17))
    LanguageModelLoss(model)(samples).backward()
    for _ in range(2):
        (LanguageModelLoss(twice)(samples) / 2).backward()
    for one, other in zip(model.parameters(), twice.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("chunk", [16, 70, 1000])
@pytest.mark.parametrize("factor", [1.0, 1024.0])
def test_the_fused_kernel_errs_no_more_than_all_logits_at_once(chunk: int, factor: float) -> None:
    """As `test_chunks_err_no_more_than_all_logits_at_once`, in float32, which Triton's interpreter computes exactly."""
    pytest.importorskip("triton")
    given = operands(torch.float32)
    exact = results(plain, given[0].double(), given[1].double(), given[2], factor)
    whole = results(plain, *given, factor)
    fused = results(lambda *each: linear_cross_entropy(*each, chunk, "triton"), *given, factor)
    for name, truth, there, here in zip(("loss", "hidden", "weight"), exact, whole, fused, strict=True):
        allowed = 2 * (there - truth).norm() + 8 * torch.finfo(torch.float32).eps * truth.norm()
        assert (here - truth).norm() <= allowed, name


@pytest.mark.parametrize(
    ("tokens", "size", "chunks"),
    [
        (8192, 8192, 1),
        (32768, 8192, 4),
        (16384, 8192, 2),
        (10672, 10672, 1),
        (10673, 5376, 2),
        (40000, 10112, 4),
        (5, 128, 1),
    ],
)
def test_chunks_of_the_fused_kernel_leave_no_small_rest(tokens: int, size: int, chunks: int) -> None:
    """10,672 tokens with a vocabulary of 50,304 are 1 GiB of logits; the number of chunks does not grow."""
    most = 10672
    assert _even_chunk(tokens, most) == size <= most and -(-tokens // size) == chunks == -(-tokens // most)
