"""Checks of mixtures of experts: their layers, routers and groups, and the features that they do not support."""

from megatron_coca.config.base import shown
from megatron_coca.config.checks.recording import Check
from megatron_coca.config.model import DENSE, EXPERTS, GAU
from megatron_coca.config.schema import Settings


def _layers(settings: Settings) -> str | None:
    model = settings.model
    try:
        named = model.mlp_names
    except ValueError as error:
        return str(error)
    if unknown := sorted(set(named) - {DENSE, EXPERTS}):
        return f"unknown type {shown(unknown[0])}; use {DENSE} or {EXPERTS}"
    if model.mlp_config is None:
        return None
    if model.moe_expert_interval != 1:
        return "contradicts moe_expert_interval; set only one of the two"
    if EXPERTS in named and model.moe_num_experts == 1:
        return "has layers of experts, but moe_num_experts is 1; set it to 2 or more"
    if EXPERTS not in named and model.moe_num_experts > 1:
        return f"no layer has experts, but moe_num_experts is {model.moe_num_experts}; set it to 1"
    return None


def _top_k(settings: Settings) -> str | None:
    model = settings.model
    if model.moe_top_k > model.moe_num_experts:
        return f"{model.moe_top_k} exceeds moe_num_experts {model.moe_num_experts}; change one of them"
    return None


def _router_type(settings: Settings) -> str | None:
    sinkhorn = settings.model.moe_router_type == "sinkhorn" and settings.model.moe_num_experts > 1
    return "sinkhorn is not supported; set moe_router_type=topk" if sinkhorn else None


def _groups(settings: Settings) -> str | None:
    model = settings.model
    groups, chosen, experts = model.moe_num_groups, model.moe_top_k_groups, model.moe_num_experts
    if chosen > groups:
        return f"moe_top_k_groups {chosen} exceeds moe_num_groups {groups}; change one of them"
    if groups == 1:
        return None
    if experts % groups or experts < 2 * groups:
        return f"{experts} experts cannot form {groups} equal groups of two or more; change it or moe_num_experts"
    available = experts // groups * chosen
    if model.moe_top_k > available:
        return f"moe_top_k {model.moe_top_k} exceeds the {available} experts of {chosen} groups; raise moe_top_k_groups"
    return None


def _activation(settings: Settings) -> str | None:
    activation, mixed = settings.model.activation, settings.model.moe_num_experts > 1
    if activation == "xielu" and mixed:
        return "xielu is not supported with moe_num_experts; set another activation"
    if activation == "clamped_swiglu" and not mixed:
        return "clamped_swiglu is supported only in mixtures of experts; set activation=swiglu, or moe_num_experts"
    return None


def _shared_gate(settings: Settings) -> str | None:
    absent = settings.model.moe_shared_gate and settings.model.moe_shared_intermediate_size is None
    return "there is no shared MLP; set moe_shared_intermediate_size" if absent else None


def _bias_update(settings: Settings) -> str | None:
    if settings.optimizer.moe_bias_update_rate == 0:
        return None
    if settings.model.moe_num_experts == 1 or not settings.model.moe_correction_bias:
        return "there are no numbers to update; set moe_correction_bias=true"
    if settings.parallel.stage == 3:
        return "not supported with ZeRO 3, which divides these numbers among ranks; use ZeRO 0, 1 or 2"
    return None


def _parallel(settings: Settings) -> str | None:
    """Check the kinds of parallelism. Mixtures support only data parallelism."""
    if settings.model.moe_num_experts == 1:
        return None
    keys = settings.parallel
    reasons = {
        "model_parallel_size": "DeepSpeed's tensor parallelism (AutoTP) cannot shard stacked experts",
        "sequence_parallel_size": "the balancing loss needs all tokens of a sequence on one rank",
        "context_parallel_size": "the balancing loss needs all tokens of a sequence on one rank",
        "pipe_parallel_size": "the balancing losses of earlier stages do not reach the last stage",
    }
    for name, reason in reasons.items():
        if getattr(keys, name) > 1:
            return f"not supported with {name}, because {reason}; set {name}=1 and use data parallelism"
    if keys.cuda_graphs:
        return "not supported with cuda_graphs, which cannot contain the counts of routers; set cuda_graphs=false"
    if GAU in settings.model.layer_names:
        return "not supported with layers of type gau, which have no MLP; remove one of the two"
    return None


CHECKS = (
    Check("mlp_config", _layers),
    Check("moe_top_k", _top_k),
    Check("moe_router_type", _router_type),
    Check("moe_num_groups", _groups),
    Check("activation", _activation),
    Check("moe_shared_gate", _shared_gate),
    Check("moe_bias_update_rate", _bias_update),
    Check("moe_num_experts", _parallel),
)
