"""Predicted time of a training step on A100, H100, H200 and B200, from counts and named assumptions.

A step takes the longer of what its kernels take one after the other (matrix products and attention by their FLOPs, all
other kernels by their bytes) and what the host takes to launch them, and in addition the communication that does not
run beside the backward pass. The shares are fitted to published runs (docs/launch.md). No step of this project has run
on a GPU, so a range is predicted.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_coca.config import BatchSizes, Config
from megatron_coca.model.cost import BYTES, flops_per_token, pass_counts, peak_flops
from megatron_coca.training.estimate import LIVE_PARAMETERS, stage_parameters, stage_trained
from megatron_coca.training.topology import Topology, zero_section


class Device(NamedTuple):
    """Data-sheet figures of a GPU, and the shares of its peak that kernels are assumed to reach.

    Attributes:
        name: PyTorch's device name, which `model.cost.PEAKS` knows.
        memory: bytes per second.
        nvlink: bytes per second and direction to the other GPUs of a host.
        products: share of the peak FLOP/s in matrix products.
        attention: share of the peak in fused attention, of the FLOPs that a causal kernel executes.
        slow_attention: the same of slower kernels.
        error: largest relative error of MFU against the published runs that the shares are fitted to; None without.
    """

    name: str
    memory: float
    nvlink: float
    products: float
    attention: float
    slow_attention: float
    error: float | None = None


DEVICES: dict[str, Device] = {
    "A100-80": Device("NVIDIA A100-SXM4-80GB", 2.039e12, 300e9, 0.69, 0.40, 0.26, 0.04),
    "H100": Device("NVIDIA H100 80GB HBM3", 3.35e12, 450e9, 0.54, 0.35, 0.14, 0.11),
    "H200": Device("NVIDIA H200", 4.8e12, 450e9, 0.54, 0.35, 0.14),
    "B200": Device("NVIDIA B200", 8.0e12, 900e9, 0.50, 0.25, 0.10),
}
"""Memory and NVLink from NVIDIA's data sheets: A100 80GB SXM (600 GB/s in both directions), H100 SXM and H200 (900),
DGX B200 (1,800). On A100 and H100 the shares of products and of slow attention are fitted to published steps of MPT,
whose attention is a Triton kernel (tests/golden/step_calibration.py). The faster attention is an assumption for the
library kernels, FlashAttention-2 and cuDNN with 64 features a head, as are all shares of B200; H200 has those of H100.
"""
ERROR = 0.15
"""Relative error that is assumed of the GPUs without published runs."""

ASSUMPTIONS: dict[str, tuple[float, str]] = {
    "memory": (0.85, "share of the memory bandwidth that other kernels reach"),
    "launch": (8e-6, "seconds of the host for a kernel, PyTorch's autograd included, on a fast host"),
    "slow launch": (26e-6, "the same on a slow host: 67.8 ms for 2,564 kernels on the stand-in device"),
    "nvlink": (0.78, "share of NVLink's bandwidth in NCCL's collectives; 230 of 300 GB/s are reported for A100"),
    "infiniband": (0.90, "share of InfiniBand's bandwidth in NCCL's collectives"),
    "nvlink hop": (1e-6, "seconds for a message to reach the next GPU of a host"),
    "network hop": (5e-6, "seconds for a message to reach the next host"),
}
"""Value and meaning of every other assumption; the tool prints them."""

GPUS_PER_HOST = 8
LINK = 50e9
"""Bytes per second and direction of a 400 Gb/s InfiniBand link."""

OPTIMIZER_BYTES = 52.0
"""Per parameter of a rank: norm (4), clipping (8), AdamW in float32 (28), gradient to and weight from float32 (12)."""
COPIED_BYTES = 8.0
"""Per parameter: each gradient is copied into a bucket and divided, in half precision."""
GRAPH_LAUNCHES = 2
"""Launches of the host for a micro-batch that is captured as a CUDA graph."""
OPTIMIZER_LAUNCHES = 72
"""Kernels of a step besides those of `model.cost.pass_counts`; counted at one of 8 simulated ranks."""


class Communication(NamedTuple):
    """Bytes of a step: of the tensors that a rank gives to all-reduce and reduce-scatter, or gets from all-gather.

    Attributes:
        reduced: gradients; for each micro-batch with ZeRO 2 and 3.
        reductions: number of times that all gradients are reduced.
        gathered: weights, after the step (ZeRO 1, 2) or before each use (ZeRO 3).
        summed: hidden states and their gradients over tensor ranks.
        exchanged: queries, keys, values and outputs between sequence ranks.
        sent: hidden states and their gradients to the next and the previous pipeline stage.
    """

    reduced: float
    reductions: int
    gathered: float
    summed: float
    exchanged: float
    sent: float


def communication(config: Config, topology: Topology, sizes: BatchSizes, numbers: int, blocks: int) -> Communication:
    """Return what a rank communicates whose pipeline stage has `numbers` trained parameters and `blocks` blocks."""
    model, size = config.model, BYTES[config.precision.dtype]
    ranks = topology.data * topology.sequence
    section = zero_section(config, ranks, cuda=True)
    stage = section["stage"]
    reductions = (sizes.accumulation if stage >= 2 else 1) if ranks > 1 else 0
    gathers = int(ranks > 1 and stage > 0)
    if gathers and stage == 3:  # again for the backward pass, unless all weights may stay until then
        kept = min(
            float(section.get(f"stage3_max_{key}", LIVE_PARAMETERS)) for key in ("live_parameters", "reuse_distance")
        )
        gathers = sizes.accumulation * (1 if numbers <= kept else 2)
    hidden = sizes.accumulation * sizes.micro * model.seq_length / topology.sequence * model.hidden_size * size
    heads = (model.num_attention_heads + 2 * model.num_kv_heads) / model.num_attention_heads + 1  # q, k, v, output
    return Communication(
        reduced=float(reductions * size * numbers),
        reductions=reductions,
        gathered=float(gathers * size * numbers),
        summed=4 * blocks * hidden if topology.tensor > 1 else 0.0,
        exchanged=2 * heads * blocks * hidden if topology.sequence > 1 else 0.0,
        sent=2 * hidden if topology.pipe > 1 else 0.0,
    )


@dataclass(frozen=True)
class Network:
    """NVLink inside hosts of `GPUS_PER_HOST`, and `links` InfiniBand links for each host."""

    device: Device
    links: int

    def seconds(self, size: float, ranks: int, stride: int, passes: int, calls: float = 1.0) -> float:
        """Return the time of ring collectives of `size` bytes in total over `ranks` ranks that are `stride` apart.

        `passes` is 2 for an all-reduce and 1 for a reduce-scatter, all-gather or all-to-all; `calls` is their number.
        """
        if ranks == 1 or size == 0:
            return 0.0
        local = max(1, min(ranks, GPUS_PER_HOST // stride))
        hosts = math.ceil(ranks / local)
        rate = self.device.nvlink * assumption("nvlink")
        if hosts > 1:  # the other groups of a host use its other links
            rate = min(rate, local * LINK * self.links / GPUS_PER_HOST * assumption("infiniband"))
        turn = hosts * ((local - 1) * assumption("nvlink hop") + (hosts > 1) * assumption("network hop"))
        return passes * ((ranks - 1) / ranks * size / rate + calls * turn)


def assumption(name: str) -> float:
    """Return the value of a row of `ASSUMPTIONS`."""
    return ASSUMPTIONS[name][0]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the rank that computes most.

    Attributes:
        compute: matrix products and attention.
        memory: all other kernels.
        launches: the host's time for all kernels.
        network: communication that nothing runs beside.
        hidden: communication that runs beside the backward pass.
        mfu: model FLOPs utilisation.
    """

    compute: float
    memory: float
    launches: float
    network: float
    hidden: float
    mfu: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return max(self.compute + self.memory, self.launches) + self.network

    @property
    def bound(self) -> str:
        """What the step spends most of its time on: compute, memory, launches or network."""
        waits_for_host = self.launches > self.compute + self.memory
        parts = ("launches", "network") if waits_for_host else ("compute", "memory", "network")
        return max(parts, key=lambda part: getattr(self, part))


def mfu_range(config: Config, gpus: int, gpu: str, links: int = GPUS_PER_HOST) -> tuple[float, float]:
    """Lowest and highest MFU to expect: with slow and fast attention and host, and the error of the calibration."""
    error = DEVICES[gpu].error or ERROR
    low, high = (step_time(config, gpus, gpu, links, slow).mfu for slow in (True, False))
    return low * (1 - error), high * (1 + error)


def step_time(config: Config, gpus: int, gpu: str, links: int = GPUS_PER_HOST, slow: bool = False) -> StepTime:
    """Predict the step on `gpus` GPUs of the kind `gpu`, a key of `DEVICES`, with `links` InfiniBand links a host, with
    `slow` attention kernels and host or fast ones.

    Raises:
        ConfigError: the processes or the batch cannot be divided, or vocab_size is not known.
    """
    device, topology = DEVICES[gpu], Topology.of(config.parallel, gpus)
    launch = assumption("slow launch" if slow else "launch")
    if slow:
        device = device._replace(attention=device.slow_attention)
    sizes = config.batch.resolve(topology.data)
    trained = zip(stage_trained(config, topology), stage_parameters(config, topology), strict=True)
    stages = [
        _stage_time(config, topology, sizes, numbers, blocks, Network(device, links), launch)
        for numbers, (_, blocks) in trained
    ]
    slowest = max(stages, key=lambda stage: stage.total)
    # The first micro-batch passes all stages before the last one is busy.
    idle = (topology.pipe - 1) / sizes.accumulation * (slowest.total - slowest.network)
    peak = gpus * (peak_flops(device.name) or math.inf)
    flops = flops_per_token(config).model * sizes.total * config.model.seq_length
    return replace(slowest, network=slowest.network + idle, mfu=flops / (slowest.total + idle) / peak)


def _stage_time(
    config: Config,
    topology: Topology,
    sizes: BatchSizes,
    numbers: int,
    blocks: int,
    network: Network,
    launch: float,
) -> StepTime:
    """The time of one pipeline stage, without waiting for others and without its MFU."""
    model, passes = config.model, sizes.accumulation
    ranks, share = topology.data * topology.sequence, topology.tensor * topology.sequence
    tokens, parts = passes * sizes.micro * model.seq_length / share, blocks / model.num_layers
    device, flops = network.device, flops_per_token(config)
    peak = peak_flops(device.name) or math.inf
    attention = (3 + (flops.executed > 3 * flops.forward)) * _attention_flops(config) * parts
    # The output head is not sharded over tensor ranks, and is in the last of the stages.
    products = flops.executed * parts - attention
    compute = tokens * (products / device.products + attention / device.attention) / peak
    counts = pass_counts(config, sizes.micro, topology.tensor, topology.sequence)
    own = numbers / ranks if zero_section(config, ranks, cuda=True)["stage"] else numbers
    moved = passes * (counts.block_bytes * blocks + counts.loss_bytes * parts)
    memory = (moved + OPTIMIZER_BYTES * own + COPIED_BYTES * numbers) / device.memory / assumption("memory")
    of_a_pass = GRAPH_LAUNCHES if model.cuda_graphs else counts.block_launches * blocks + counts.other_launches
    kernels = passes * of_a_pass + OPTIMIZER_LAUNCHES
    exposed, hidden = _network_time(config, topology, sizes, numbers, blocks, network, compute + memory)
    return StepTime(compute, memory, kernels * launch, exposed, hidden, 0.0)


def _attention_flops(config: Config) -> float:
    """FLOPs per token of causal attention, forward."""
    model = config.model
    return 2.0 * model.num_layers * model.hidden_size * (model.seq_length + 1)


def _network_time(
    config: Config, topology: Topology, sizes: BatchSizes, numbers: int, blocks: int, network: Network, computing: float
) -> tuple[float, float]:
    """Return the seconds of communication that the step waits for, and those hidden behind `computing` seconds.

    All gradients but the last bucket and the embedding's may be reduced during the backward pass, two thirds of a
    micro-batch; ZeRO 3's weights but the first ones may be gathered during both passes.
    """
    ranks = topology.data * topology.sequence
    section = zero_section(config, ranks, cuda=True)
    moved = communication(config, topology, sizes, numbers, blocks)
    stride, stage, bucket = topology.tensor, section["stage"], section["reduce_bucket_size"]
    calls = moved.reductions * math.ceil(numbers / bucket)
    reducing = network.seconds(moved.reduced, ranks, stride, 1 if stage == 3 else 2, calls)
    gathering = network.seconds(moved.gathered, ranks, stride, 1, calls if stage == 3 else 1)
    backward = 2 / 3 * computing * moved.reductions / sizes.accumulation
    last = min(1.0, (bucket + config.model.padded_vocab_size * config.model.hidden_size) / numbers)
    exposed = max(last * reducing, reducing - backward) if section["overlap_comm"] else reducing
    gathered = max(gathering / (2 * calls), gathering - computing) if stage == 3 and calls else gathering
    within = sizes.accumulation * blocks
    together = network.seconds(moved.summed, topology.tensor, 1, 2, 4 * within)
    together += network.seconds(moved.exchanged, topology.sequence, 1, 1, 4 * within)
    sending = network.seconds(moved.sent, 2 if topology.pipe > 1 else 1, ranks * stride, 1, 2 * sizes.accumulation)
    return exposed + gathered + together + sending, reducing + gathering - exposed - gathered
