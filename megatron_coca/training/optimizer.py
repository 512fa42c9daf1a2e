"""The optimizer: which parameters are trained, their groups, and the optimizers that PyTorch does not have."""

import math
import re
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.layer import SelfAttention
from megatron_coca.config import Config, OptimizerConfig
from megatron_coca.config.optimization import QUERY_KEY_VALUE, TrainablePart
from megatron_coca.model.cost import parameter_count, trained_count
from megatron_coca.model.layers import FeedForward
from megatron_coca.model.width_scaling import rate_factor

PARTS: tuple[tuple[str, tuple[TrainablePart, ...]], ...] = (
    (r"attention\.query_key_value\.query\.", ("query",)),
    (r"attention\.query_key_value\.key\.", ("key",)),
    (r"attention\.query_key_value\.value\.", ("value",)),
    (r"attention\.query_key_value\.(weight|bias)$", QUERY_KEY_VALUE),
    (r"attention\.query(_down|_up)?\.", ("query",)),
    (r"attention\.key_value_(down|up)\.", ("key", "value")),
    (r"attention\.(gate_value_base|(query|key)_(scale|offset))", QUERY_KEY_VALUE),
    (r"attention\.(dense|output_gate)\.", ("attention_output",)),
    (r"\bmlp\.router\.", ("router",)),
    (r"\bmlp\.", ("mlp",)),
    (r"(^|_layer|\.)norm\.|\blayer_scale\.", ("norms",)),
    (r"\b(word_embeddings|embedding\.projection)\.", ("embedding",)),
    (r"\b(final_linear\.|output_transform\.|final_bias$)", ("output_head",)),
    (r"\bposition_embeddings\.|attention\.position_(bias|sinks|factor|gates|offsets)\.|^positions\.", ("positions",)),
)
"""Patterns of parameter names, each with the values of `trainable` to which a matching parameter belongs."""
QK_NORMS = re.compile(r"\battention\.(query|key|qk)_layernorm\.")
"""Pattern of the names of the norms of queries and keys, which may be added after other parameters."""


ORTHOGONAL = re.compile(
    r"\battention\.(query_key_value(\.(query|key|value))?|(query|key_value)(_down|_up)|query|dense|output_gate)\.weight$"
    r"|\bmlp\.(?!router\.|shared_gate\.).*\bweight$"
)
"""Names of the matrices whose updates Muon orthogonalizes."""
UNDECAYED = re.compile(r"norm\.|\.position_offsets\.|\.mlp\.linear[12]\.bias")
"""Names of parameters without weight decay, whatever their shapes."""


def parts_of(name: str) -> tuple[TrainablePart, ...]:
    """Return the values of `trainable` to which the named parameter belongs (several for a packed projection)."""
    return next(parts for pattern, parts in PARTS if re.search(pattern, name))


def split_projections(model: nn.Module) -> None:
    """Replace every packed projection by three layers (queries, keys, values), in place."""
    for attention in [module for module in model.modules() if isinstance(module, SelfAttention)]:
        attention.split_projection()


def train_only_parts(model: nn.Module, config: OptimizerConfig) -> None:
    """Freeze, in place, all parameters that `trainable` does not name. Parameters that are never trained stay frozen.

    Every packed projection is replaced by three layers if some but not all of queries, keys and values are trained, or
    if the optimizer is Muon, which treats each of the three as a matrix. Call this after loading weights and before
    building an engine.
    """
    if config.type == "Muon" or len({config.trains(part) for part in QUERY_KEY_VALUE}) > 1:
        split_projections(model)
    if config.trainable is None:
        return
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and config.trains(*parts_of(name)))


class TrainableShare(NamedTuple):
    """The number of trained parameters and the total number of parameters of a model, in elements."""

    trained: int
    total: int

    def text(self) -> str:
        """Return the numbers as text for the log."""
        total = f"{self.total:,} parameters"
        share = f", {self.trained:,} ({self.trained / self.total:.2%}) trained"
        return total if self.trained == self.total else total + share


def trainable_share(config: Config) -> TrainableShare:
    """Count the elements of all parameters of the model, including adapters and the padding of the embedding and the
    head.

    Raises:
        ConfigError: `vocab_size` is unknown.
    """
    trained = trained_count(config)
    return TrainableShare(trained.total, parameter_count(config).total + trained.adapters)


ParameterGroups = list[dict[str, Any]]


def _next_step(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, Any]:
    """Add 1 to the step count of a weight with one moment. Return its state, which the first step creates."""
    state: dict[str, Any] = optimizer.state[weight]
    if not state:
        state.update(step=torch.zeros((), device=weight.device), exp_avg=torch.zeros_like(weight))
    state["step"] += 1
    return state


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675): w -= lr (sign(beta1 m + (1 - beta1) g) + decay w), then
    m = beta2 m + (1 - beta2) g.
    """

    def __init__(self, groups: ParameterGroups, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients; `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for weight in [weight for weight in group["params"] if weight.grad is not None]:
                state = _next_step(self, weight)
                weight.mul_(1 - rate * group["weight_decay"])
                weight.sub_(torch.lerp(weight.grad, state["exp_avg"], beta1).sign_(), alpha=rate)
                state["exp_avg"].lerp_(weight.grad, 1 - beta2)


class Muon(torch.optim.AdamW):
    """Muon (Jordan 2024) for the groups with `orthogonal`, and AdamW for the others.

    For a matrix [out, in] with the gradient g: m = mu m + (1 - mu) g, then w -= lr (O + decay w). O is the result of
    `orthogonalized` for (1 - mu) g + mu m. O is as large as an update of AdamW, so the same rate suits both optimizers
    (Liu et al. 2025, arXiv:2502.16982). A weight [n, out, in] counts as n matrices. A weight in a group with `stacked`
    consists of `stacked` matrices, one below the other. `torch.optim.Muon` computes the same updates, but needs whole
    matrices, and the engine divides matrices among ranks. m is `exp_avg` in the state.
    """

    def __init__(
        self, groups: ParameterGroups, lr: float, momentum: float, betas: tuple[float, float], eps: float
    ) -> None:
        groups = [{"orthogonal": False, "stacked": 1, "momentum": momentum} | group for group in groups]
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)

    def is_orthogonal(self, weight: Tensor) -> bool:
        """Return whether the weight is in a group with `orthogonal`."""
        groups = (group["params"] for group in self.param_groups if group["orthogonal"])
        return any(weight is each for group in groups for each in group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights that have gradients; `closure` is not supported. The gradients of matrices are removed."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"] if group["orthogonal"] else ():
                if weight.grad is not None:
                    self.move(group, weight, orthogonalized(self.averaged(group, weight), group["stacked"]))
                    weight.grad = None  # so that AdamW does not update it
        super().step()

    def averaged(self, group: dict[str, Any], weight: Tensor) -> Tensor:
        """Add the gradient of a matrix, or of a part of it, to its momentum, and return a weighted mean of the two."""
        state, momentum, grad = _next_step(self, weight), group["momentum"], weight.grad
        assert grad is not None
        state["exp_avg"].lerp_(grad, 1 - momentum)
        return torch.lerp(grad, state["exp_avg"], momentum)

    @staticmethod
    def move(group: dict[str, Any], weight: Tensor, direction: Tensor) -> None:
        """Update a matrix, or a part of it, along `direction`, which has the same shape."""
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration of Jordan 2024, x -> a x + b x^3 + c x^5 for each singular value x."""


def orthogonalized(matrix: Tensor, stacked: int = 1) -> Tensor:
    """Return the orthogonal factor of a float32 matrix [..., out, in], times 0.2 sqrt(max(out, in)). Five Newton-Schulz
    iterations in bfloat16 map the singular values to about 0.7 to 1.2.

    The matrix consists of `stacked` matrices, one below the other. Each of them gets its own factor.
    """
    a, b, c = NEWTON_SCHULZ
    rows, columns = matrix.size(-2) // stacked, matrix.size(-1)
    tall = rows > columns
    x = matrix.bfloat16().view(-1, rows, columns)
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.mT if tall else x
    return x.reshape(matrix.shape).to(matrix.dtype).mul_(0.2 * math.sqrt(max(rows, columns)))


OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "Adam": torch.optim.AdamW,
    "AdamW": torch.optim.AdamW,
    "cpu_adam": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "lion": Lion,
    "Muon": Muon,
}
"""Optimizers by their GPT-NeoX names. GPT-NeoX's Adam has decoupled weight decay, too. PyTorch's fused AdamW needs no
compiler on the CPU.
"""


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, separate_norms: bool = False, width_ratio: float = 1.0
) -> torch.optim.Optimizer:
    """Build the configured optimizer. The engine sets its learning rates before every step with `set_rates`.
    `parameter_groups` explains `separate_norms` and `width_ratio`.
    """
    assert config.lr is not None
    groups = parameter_groups(model, config.weight_decay, separate_norms, config.type == "Muon", width_ratio)
    set_rates(groups, config.lr)
    if OPTIMIZERS[config.type] is torch.optim.SGD:
        return torch.optim.SGD(groups, lr=config.lr)
    if config.type == "lion":
        return Lion(groups, config.lr, config.betas)
    if config.type == "Muon":
        return Muon(groups, config.lr, config.momentum, config.betas, config.eps)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_rates(groups: ParameterGroups, learning_rate: float) -> None:
    """Set the learning rates of an optimizer's groups for a step: `learning_rate` times the factor of each group."""
    for group in groups:
        group["lr"] = learning_rate * group.get("rate_factor", 1.0)


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    separate_norms: bool = False,
    orthogonal: bool = False,
    width_ratio: float = 1.0,
) -> ParameterGroups:
    """Group the parameters that require gradients. As in GPT-NeoX, weight decay applies to matrices and embeddings but
    not to biases and norms. It does not apply to angles either.

    With `separate_norms`, norms of queries and keys are in a separate group, because DeepSpeed keeps one step count for
    each group and these norms were added after the other parameters. With `orthogonal`, the matrices of Muon are in
    separate groups, which come first. The value and the gate of a gated MLP count as one matrix each.

    `width_ratio` is `ModelConfig.width_ratio`. If it is not 1, each group has the factor `rate_factor` on its learning
    rate. Its weight decay is divided by this factor, so that a step shrinks weights as much as at the base width.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    matrices = {name for name, parameter in trainable.items() if parameter.dim() >= 2 and not UNDECAYED.search(name)}
    added = {name for name in trainable if separate_norms and QK_NORMS.search(name)}
    muon = {name for name in matrices if orthogonal and ORTHOGONAL.search(name)}
    decayed = [parameter for name, parameter in trainable.items() if name in matrices - muon]
    undecayed = [parameter for name, parameter in trainable.items() if name not in matrices | added]
    groups: ParameterGroups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    groups.append({"params": [trainable[name] for name in trainable if name in added], "weight_decay": 0.0})
    if orthogonal:
        gated = [name for name, each in model.named_modules() if isinstance(each, FeedForward) and each.gated]
        pairs = {f"{name}.linear1.weight" for name in gated}
        for stacked, names in ((2, muon & pairs), (1, muon - pairs)):
            own = [parameter for name, parameter in trainable.items() if name in names]
            groups.insert(0, {"params": own, "weight_decay": weight_decay, "orthogonal": True, "stacked": stacked})
    groups = [group for group in groups if group["params"]]
    return groups if width_ratio == 1.0 else _divided_by_rate(groups, trainable, width_ratio)


def _divided_by_rate(
    groups: ParameterGroups, trainable: dict[str, nn.Parameter], width_ratio: float
) -> ParameterGroups:
    """Split each group into groups whose parameters have the same factor on the learning rate. Keep the order of
    parameters.
    """
    names, divided = {id(parameter): name for name, parameter in trainable.items()}, []
    for group in groups:
        parts: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            factor = rate_factor(names[id(parameter)], width_ratio, "orthogonal" in group)
            parts.setdefault(factor, []).append(parameter)
        divided += [
            group | {"params": own, "weight_decay": group["weight_decay"] / factor, "rate_factor": factor}
            for factor, own in parts.items()
        ]
    return divided
