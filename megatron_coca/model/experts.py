"""Mixtures of experts: a router sends each token to a few of many MLPs, without dropping tokens.

Every sum has a fixed order, so that a repeated step has the same results. Gradients of an expert are summed over its
rows in order. Results of a token are summed over its choices in order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.config import ModelConfig
from megatron_coca.model.layers import MLP, FeedForward

TINY = 1e-20
"""Number that is added to a sum of weights before a division, as in DeepSeek 3, so that the divisor is not 0."""
GROUPED_BYTES = 16
"""`torch._grouped_mm` reads rows in units of this many bytes."""


class Routing(NamedTuple):
    """The choices of a router for T tokens.

    Attributes:
        experts: the chosen experts of each token, int64 [T, k].
        weights: the weights of these experts, [T, k].
        load: number of tokens that chose each expert, int64 [experts].
        balance: the balancing loss, a scalar; see `moe_loss_coeff`. 0 if no gradients are computed.
        z: the mean squared log-sum-exp of the logits, a scalar. 0 if no gradients are computed.
    """

    experts: Tensor
    weights: Tensor
    load: Tensor
    balance: Tensor
    z: Tensor


class ExpertRouter(nn.Module):
    """Scores the experts for each token, in float32 or better, and chooses the best ones.

    `correction_bias` [experts] changes only which experts are chosen, not `Routing.weights`. It is not trained by
    gradients. If the module is converted to half precision, `correction_bias` stays in float32, because rounding would
    remove its small updates.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        experts = model.moe_num_experts
        self.top_k, self.normalizes = model.moe_top_k, model.moe_norm_topk_prob
        self.groups, self.chosen_groups = model.moe_num_groups, model.moe_top_k_groups
        self.summed = 1 if model.moe_group_scores == "max" else 2  # best scores per group
        self.sigmoid, self.factor = model.moe_router_scores == "sigmoid", model.moe_routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(experts, model.hidden_size))
        self.bias = nn.Parameter(torch.zeros(experts)) if model.moe_router_bias else None
        given = nn.Parameter(torch.zeros(experts), requires_grad=False) if model.moe_correction_bias else None
        self.correction_bias = given

    def forward(self, x: Tensor) -> Routing:
        """Choose experts for tokens x [T, hidden_size]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide), None if self.bias is None else self.bias.to(wide))
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        experts = self._choose(scores.detach())
        weights = scores.gather(-1, experts)
        if self.normalizes:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        load = torch.zeros(scores.shape[-1], dtype=torch.int64, device=x.device)
        load.scatter_add_(0, experts.flatten(), torch.ones_like(experts).flatten())
        weights = weights * self.factor
        if not torch.is_grad_enabled():
            return Routing(experts, weights, load, *logits.new_zeros(2))
        shares = scores / (scores.sum(-1, keepdim=True) + TINY) if self.sigmoid else scores
        balance = len(load) * (shares.mean(0) * (load.to(wide) / experts.numel())).sum()
        return Routing(experts, weights, load, balance, logits.logsumexp(-1).square().mean())

    def _choose(self, scores: Tensor) -> Tensor:
        ranked = scores if self.correction_bias is None else scores + self.correction_bias
        if self.groups > 1:
            grouped = ranked.unflatten(-1, (self.groups, -1))
            best = grouped.topk(self.summed, dim=-1).values.sum(-1).topk(self.chosen_groups, dim=-1).indices
            kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
            ranked = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
        return ranked.topk(self.top_k, dim=-1).indices

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ExpertRouter":
        """Move and convert the parameters as PyTorch does, but keep the precision of `correction_bias`."""
        bias = self.correction_bias
        before = None if bias is None else bias.detach()
        super()._apply(fn, recurse)
        after = self.correction_bias
        if before is not None and after is not None and after.dtype in (torch.bfloat16, torch.float16):
            moved = torch.empty_like(before, device=after.device) if before.is_meta else before.to(after.device)
            after.data = moved
        return self


class StackedLinear(nn.Module):
    """One linear map for each expert: `weight` [experts, out, in], and `bias` [experts, out] or None."""

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(experts, outputs)) if bias else None

    def forward(self, x: Tensor, sorted_experts: Tensor, load: Tensor) -> Tensor:
        """Apply the linear map of each row's expert to x [rows, in]. `sorted_experts` has the expert of each row, in
        ascending order. `load` has the number of rows of each expert.
        """
        if can_group(x, self.weight):
            ends = load.cumsum(0).to(torch.int32)
            out = torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)
            if self.bias is None:
                return out
            # The gradient of this product is summed in a fixed order. On a GPU, the gradient of indexing has no order.
            return out + F.one_hot(sorted_experts, len(load)).to(x.dtype) @ self.bias
        biases = [None] * len(load) if self.bias is None else self.bias.unbind()
        parts = zip(x.split(load.tolist()), self.weight.unbind(), biases, strict=True)
        return torch.cat([F.linear(rows, weight, bias) for rows, weight, bias in parts])


def can_group(x: Tensor, weight: Tensor) -> bool:
    """Return whether one call of `torch._grouped_mm` computes the products of all experts, without waiting for the
    device. Otherwise a loop over the experts computes them.
    """
    aligned = all(size * x.element_size() % GROUPED_BYTES == 0 for size in weight.shape[1:])
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned and hasattr(torch, "_grouped_mm")


class _Sent(torch.autograd.Function):
    """Copy tokens [T, width] to the rows [T k, width] of their experts. Gradients are summed over a token's choices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return gradient[places].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Returned(torch.autograd.Function):
    """Reorder rows [T k, width] from the order of experts to the order of tokens and choices. If `order` and `places`
    are exchanged, do the reverse.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[places]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradient[order], None, None


class ExpertMixture(FeedForward):
    """sum_i w_i MLP_i(x) over the experts i that the router chooses for a token. If the model has a shared MLP, its
    output is added for every token. With `moe_weights_on_input`, the terms of the sum are MLP_i(w_i x).

    Input and output are hidden states [..., hidden_size].

    Attributes:
        routing: the router's result in the last forward pass within `recorded_routing`, or None if none was recorded.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        experts, width, bias = model.moe_num_experts, model.expert_width, model.use_bias_in_mlp
        self.router = ExpertRouter(model)
        self.linear1 = StackedLinear(experts, model.hidden_size, 2 * width if self.gated else width, bias)
        self.linear2 = StackedLinear(experts, width, model.hidden_size, bias)
        shared = model.moe_shared_intermediate_size
        self.shared = MLP(model, shared) if shared is not None else None
        self.shared_gate = nn.Linear(model.hidden_size, 1, bias=False) if model.moe_shared_gate else None
        self.weighs_inputs = model.moe_weights_on_input
        self.routing: Routing | None = None
        self.records = False

    def _feed(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        routing = self.router(tokens)
        if self.records:  # not when activations are recomputed in the backward pass
            self.routing = routing
        k = routing.experts.shape[1]
        sorted_experts, order = routing.experts.flatten().sort(stable=True)
        places = order.argsort()
        rows, weights = _Sent.apply(tokens, order, places, k), routing.weights.to(tokens.dtype)
        if self.weighs_inputs:
            rows = rows * _Returned.apply(weights.reshape(-1, 1), places, order)
        inner = self.inner(self.linear1(rows, sorted_experts, routing.load))
        rows = self.linear2(inner, sorted_experts, routing.load)
        results = _Returned.apply(rows, order, places).unflatten(0, (-1, k))
        out = (results if self.weighs_inputs else results * weights[..., None]).sum(1)
        if self.shared is not None:
            every = self.shared(tokens)
            out = out + (every if self.shared_gate is None else every * self.shared_gate(tokens).sigmoid())
        return out.view(x.shape)

    def take_routing(self) -> Routing:
        """Return the router's result of the last pass within `recorded_routing`, and forget it."""
        routing, self.routing = self.routing, None
        assert routing is not None, "no pass was recorded"
        return routing


def mixtures_of(module: nn.Module) -> list[ExpertMixture]:
    """Return the mixtures of experts in a model, in the order of its layers."""
    return [each for each in module.modules() if isinstance(each, ExpertMixture)]


@contextmanager
def recorded_routing(mixtures: Sequence[ExpertMixture]) -> Iterator[None]:
    """Keep the routers' results of forward passes within the `with` block, in `ExpertMixture.routing`."""
    for each in mixtures:
        each.records = True
    try:
        yield
    finally:
        for each in mixtures:
            each.records = False


class StepRouting(NamedTuple):
    """The routers' choices and losses in a training step, for all layers with mixtures.

    Attributes:
        load: number of tokens that chose each expert, int64 [layers, experts].
        balance: the balancing loss of each layer, averaged over forward passes, float64 [layers].
        z: the mean squared log-sum-exp of each layer's logits, averaged over forward passes, float64 [layers].
    """

    load: Tensor
    balance: Tensor
    z: Tensor


class Balancing:
    """Computes the losses that balance the experts of a model, and collects the routers' results of each step.

    Attributes:
        mixtures: the mixtures of the model, in the order of its layers.
    """

    def __init__(self, mixtures: Sequence[ExpertMixture], loss: float, z: float, update_rate: float) -> None:
        """`loss`, `z` and `update_rate` are `moe_loss_coeff`, `moe_z_loss_coeff` and `moe_bias_update_rate`."""
        self.mixtures, self._loss, self._z, self._rate = mixtures, loss, z, update_rate
        self._seen: list[list[Routing]] = []

    @contextmanager
    def kept_corrections(self) -> Iterator[None]:
        """Keep the float32 values of `correction_bias` if the `with` block converts the weights one by one."""
        biases = [each.router.correction_bias for each in self.mixtures]
        before = [None if bias is None else bias.detach().clone() for bias in biases]
        yield
        for bias, values in zip(biases, before, strict=True):
            if bias is not None and values is not None and bias.shape == values.shape:  # ZeRO 3 divides biases
                bias.data = values.to(bias.device)

    def gradient_of(self, routings: list[Routing]) -> Tensor:
        """Return a scalar with the value 0 and the gradient of the balancing losses. `routings` has the results of all
        routers in one forward pass.
        """
        self._seen.append([each._replace(balance=each.balance.detach(), z=each.z.detach()) for each in routings])
        balance, z = (torch.stack(values).mean() for values in zip(*((r.balance, r.z) for r in routings), strict=True))
        added = self._loss * balance + self._z * z
        return added - added.detach()

    def take(self) -> StepRouting | None:
        """Combine and forget the results of the forward passes since the last call. Return None if there are none."""
        passes, self._seen = self._seen, []
        if not passes:
            return None
        load = torch.stack([torch.stack([each.load for each in layers]) for layers in passes]).sum(0)
        losses = [torch.stack([torch.stack((each.balance, each.z)) for each in layers]) for layers in passes]
        balance, z = torch.stack(losses).double().mean(0).unbind(-1)
        return StepRouting(load, balance, z)

    @torch.no_grad()
    def update(self, load: Tensor) -> None:
        """Update every `correction_bias` after a step with this `load` [layers, experts]. Experts below the mean load
        gain `moe_bias_update_rate`, and experts above the mean lose it.
        """
        if self._rate == 0:
            return
        below = (load.double().mean(-1, keepdim=True) - load).sign()
        for mixture, signs in zip(self.mixtures, below, strict=True):
            assert mixture.router.correction_bias is not None
            mixture.router.correction_bias.add_(signs.to(mixture.router.correction_bias.dtype), alpha=self._rate)
