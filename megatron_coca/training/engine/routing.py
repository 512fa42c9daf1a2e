"""Balance mixtures of experts in training: one update for each step, and the metrics of the routers."""

import torch.distributed as dist

from megatron_coca.config import Config
from megatron_coca.model import GPT
from megatron_coca.model.experts import Balancing, StepRouting, mixtures_of
from megatron_coca.training.engine import group


def balancing_of(model: GPT, config: Config) -> Balancing | None:
    """Return the balancing of a model that is trained, or None if it has no mixtures of experts."""
    keys, mixtures = config.optimizer, mixtures_of(model)
    if not mixtures:
        return None
    rate = keys.moe_bias_update_rate * keys.trains("router")  # the choices of frozen routers must not change
    return Balancing(mixtures, keys.moe_loss_coeff, keys.moe_z_loss_coeff, rate)


def finish_routing(balancing: Balancing | None, taken: bool) -> StepRouting | None:
    """Return the choices and losses of the routers of all ranks in a step; None without mixtures of experts. If the
    step changed weights (`taken`), update the balancing. Every rank must call this.
    """
    routing = balancing.take() if balancing is not None else None
    if balancing is None or routing is None:
        return None
    if group.world_size() > 1:
        dist.all_reduce(routing.load)
        for losses in (routing.balance, routing.z):
            dist.all_reduce(losses)
            losses /= group.world_size()
    if taken:
        balancing.update(routing.load)
    return routing


def routing_figures(routing: StepRouting | None, layers: list[int]) -> dict[str, float]:
    """Return the metrics of a step's routing by name. `layers` are the numbers of the layers with mixtures, from 0.

    This waits for the device.
    """
    if routing is None:
        return {}
    shares = routing.load.double() / routing.load.sum(-1, keepdim=True) * routing.load.shape[-1]
    largest, unused = shares.amax(-1).tolist(), (routing.load == 0).sum(-1).tolist()
    figures = {"moe_loss": float(routing.balance.mean()), "moe_z_loss": float(routing.z.mean())}
    for number, most, idle in zip(layers, largest, unused, strict=True):
        figures |= {f"moe_largest_load/layer_{number}": most, f"moe_unused_experts/layer_{number}": idle}
    return figures
