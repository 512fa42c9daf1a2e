"""Estimate the parameters, FLOPs, GPU memory by part, tokens per second and days of a run.

    megatron-coca estimate configs/350M/roformer_coca.yml configs/cluster/a100x8.yml --gpus 8 --gpu A100-80
    megatron-coca estimate models/qwen3 configs/finetune/lora.yml --gpus 1   (a folder with the network)

The command starts nothing and needs no GPU. Times are computed from FLOPs and a utilisation (--mfu), by default that of
the CoCA paper's own run. Communication between hosts is not counted. The exit status is 1 if the run or one of its
stages does not fit, and 2 if the configuration is invalid.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_coca.commands import command_parser
from megatron_coca.config import BatchSizes, Config, ConfigError, load_config, split_inputs
from megatron_coca.support.arguments import add_configurations, model_of
from megatron_coca.support.plain_text import plain

if TYPE_CHECKING:
    from megatron_coca.training.estimate import Memory, RunEstimate

# PyTorch takes seconds to import, so it is imported after the configuration is validated.

PARTS = ("weights", "gradients", "optimizer", "buffers", "activations", "loss", "context")
DEFAULT_MFU = 0.264
"""The utilisation if --mfu is not set: in the CoCA paper, 100.0B tokens took 96 hours on 8 A100 (docs/training.md)."""
SOURCE = "the CoCA paper's run on one host with 8 A100"
GPUS_OF_SOURCE = 8

OPERANDS = {False: "are wider than V", True: "are computed from magnitudes"}
"""The end of a note on the operands of polar forms. The key is whether the attention backend receives magnitudes."""


class Gpu(NamedTuple):
    """A GPU: its device name in PyTorch, and the memory that programs can use, in GiB."""

    device: str
    memory: float


GPUS: dict[str, Gpu] = {
    "A100-80": Gpu("NVIDIA A100-SXM4-80GB", 79.2),
    "A100-40": Gpu("NVIDIA A100-SXM4-40GB", 39.4),
    "A800": Gpu("NVIDIA A800-SXM4-80GB", 79.2),
    "H100": Gpu("NVIDIA H100 80GB HBM3", 79.2),
    "H200": Gpu("NVIDIA H200", 139.8),
    "H20": Gpu("NVIDIA H20", 95.1),
    "GH200": Gpu("NVIDIA GH200 480GB", 94.5),
    "B200": Gpu("NVIDIA B200", 178.4),
    "V100-32": Gpu("Tesla V100-SXM2-32GB", 31.7),
    "L40S": Gpu("NVIDIA L40S", 44.4),
    "4090": Gpu("NVIDIA GeForce RTX 4090", 23.5),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the estimate, and return the exit status: 0, or 1 if the run does not fit. Raises ConfigError."""
    options = parser().parse_intermixed_args(arguments)
    if options.mfu is not None and not 0 < options.mfu <= 1:
        parser().error(f"--mfu {options.mfu}: must be above 0 and at most 1")
    if options.gpus is not None and options.gpus < 1:
        parser().error(f"--gpus {options.gpus}: must be at least 1")
    config = _read(options)
    gpus = options.gpus or _configured_gpus(config)
    from megatron_coca.model.cost import peak_flops
    from megatron_coca.training.corpus import with_vocabulary
    from megatron_coca.training.estimate import estimate, fits, larger_micro_batch

    config, note = with_vocabulary(config)
    if note is not None:
        print(plain(f"megatron-coca estimate: {note}"), file=sys.stderr)
    gpu, tokens, seconds, fitting = GPUS[options.gpu], 0, 0.0, True
    for stage in config.run_stages():
        if config.schedule.stages:
            print(f"steps {stage.first:,} to {stage.last:,}: {stage.text}\n")
        steps = stage.config.schedule.train_iters and stage.last - stage.first
        schedule = stage.config.schedule.model_copy(update={"train_iters": steps})
        own = stage.config.model_copy(update={"schedule": schedule})
        result = estimate(own, gpus, peak_flops(gpu.device) or 0.0, DEFAULT_MFU if options.mfu is None else options.mfu)
        fit = fits(result.memory, gpu.memory)
        print("\n".join((*_lines(own, result, options), *_verdict(result, gpu.memory, fit))))
        if fit and (larger := larger_micro_batch(own, gpus, gpu.memory)) is not None:
            print(_advice(*larger))
        if config.schedule.stages:
            print()
        tokens, seconds = tokens + (result.total_tokens or 0), seconds + (result.seconds or 0.0)
        fitting = fitting and fit
    if config.schedule.stages:
        print(f"all stages: {tokens:,} tokens, {seconds / 86400:.2f} days")
    return 0 if fitting else 1


def parser() -> ArgumentParser:
    parser = command_parser("estimate", __doc__)
    inputs = "YAML files, merged in order, and key=value pairs; a model folder as the first input sets the network"
    add_configurations(parser, inputs)
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="total number of GPUs; default: num_gpus times the number of hosts, else as few as the model needs",
    )
    parser.add_argument("--gpu", choices=GPUS, default="A100-80", help="GPU model (default: %(default)s)")
    parser.add_argument(
        "--mfu",
        type=float,
        metavar="SHARE",
        help=f"achieved fraction of the GPU's peak FLOP/s (default: {DEFAULT_MFU}, {SOURCE})",
    )
    return parser


def _read(options: Namespace) -> Config:
    """Return the configuration of the run. As in `megatron-coca train`, the run may start from a model's folder."""
    model, rest = model_of(options.inputs, options.conf_dir)
    files, keys = split_inputs(rest, options.conf_dir)
    if model is None:
        return load_config(files, keys)
    from megatron_coca.checkpoints.importing import starting_config

    return starting_config(model, keys, files)


def _configured_gpus(config: Config) -> int:
    from megatron_coca.training.launch.start import configured_ranks

    keys, parallel = config.launch, config.parallel
    needed = parallel.model_copies * parallel.sequence_ranks
    try:
        ranks = configured_ranks(keys)
        return max(ranks, needed) if keys.num_gpus is None and ranks == 1 else ranks
    except ConfigError as error:
        raise ConfigError(f"{error}; or give --gpus") from error


def _lines(config: Config, result: "RunEstimate", options: Namespace) -> Iterator[str]:
    from megatron_coca.model.cost import adapter_count
    from megatron_coca.training.optimizer import trainable_share
    from megatron_coca.training.topology import rounded_sum

    count, grid, memory, share = result.parameters, result.topology, result.memory, trainable_share(config)
    yield f"parameters         {count.total:>18,}   {count.non_embedding:,} without embedding and head"
    if count.idle:
        yield f"active             {count.active:>18,}   {count.active / count.total:.2%} process a token"
    if share.trained != share.total:
        adapters = f", {adapter_count(config):,} of them in adapters" * (config.optimizer.lora is not None)
        yield f"trained            {share.trained:>18,}   {share.trained / share.total:.2%}{adapters}"
    for part in ("embedding", "attention", "mlp", "norms", "position", "head"):
        yield f"  {part:<16} {getattr(count, part):>18,}"
    freezes = config.optimizer.lora is not None or config.optimizer.trainable is not None
    formula = "6N + 12 L h n" + ", and 4N for frozen weights" * freezes
    yield f"FLOPs per token    {result.flops.model:>18.3e}   {formula}; {result.flops.executed:.3e} executed"
    yield ""
    axes = ", ".join(f"{name} {size}" for name, size in grid.layout().items())
    yield f"GPUs               {grid.world_size:>18,}   {options.gpu}: {axes}"
    sizes = f"micro batch {result.sizes.micro} x accumulation {result.sizes.accumulation} x data {grid.data}"
    yield f"samples per step   {result.sizes.total:>18,}   {sizes}"
    yield f"tokens per step    {result.tokens_per_step:>18,}   {result.sizes.total} x {config.model.seq_length}"
    yield f"attention backend  {', '.join(dict.fromkeys(result.backends.values())):>18}{_operands(config, result)}"
    yield ""
    yield f"memory of one GPU  {_gib(memory.total):>18}   at the peak of a step"
    for part in PARTS:
        yield f"  {part:<16} {_gib(getattr(memory, part)):>18}"
    if grid.sequence_ranks > 1:
        parts = {"all-to-all": result.sent.exchange, "ring": result.sent.ring}
        listed = ", ".join(f"{name} {sent / 2**10:,.1f} KiB" for name, sent in parts.items() if sent)
        total = f"{sum(parts.values()) / 2**10:,.1f} KiB"
        yield f"sent per token     {total:>18}   between the ranks of a sequence: {listed}"
    if memory.host:
        yield f"memory of the host {_gib(memory.host * grid.world_size):>18}   offloaded, all processes"
    yield ""
    yield f"tokens per second  {result.tokens_per_second:>18,.0f}   {_utilisation(options)}"
    if result.total_tokens is not None and result.seconds is not None:
        yield f"steps              {config.schedule.train_iters:>18,}"
        yield f"tokens             {result.total_tokens:>18,}"
        counted = _communication(options, grid.world_size)
        yield f"days               {result.seconds / 86400:>18.2f}   {counted}".rstrip()
    if config.precision.dtype == "fp32":
        yield "precision fp32: the estimate assumes bfloat16's peak FLOP/s; expect a fraction of this speed"
    if (note := rounded_sum(config, result.sizes)) is not None:
        yield note


def _operands(config: Config, result: "RunEstimate") -> str:
    """Return a note on the operands of polar forms; an empty text if no layer has such a form."""
    from megatron_coca.model.cost import operand_method

    types, model = config.layer_types, config.model
    methods = (operand_method(types[name], model.with_heads(name), own) for name, own in result.backends.items())
    found = sorted({OPERANDS[method.magnitudes] for method in methods if method.form.by_magnitudes})
    return "".join(f"   Q' and K' {text}" for text in found)


def _utilisation(options: Namespace) -> str:
    """Return the utilisation and its source."""
    if options.mfu is not None:
        return f"at {options.mfu:.1%} MFU, from --mfu"
    other = "" if options.gpu.startswith("A100") else f"; not measured on {options.gpu}"
    return f"at {DEFAULT_MFU:.1%} MFU, {SOURCE}{other}"


def _communication(options: Namespace, gpus: int) -> str:
    """Return a note on the communication that the time contains or lacks. It may be empty."""
    if options.mfu is not None:
        return "with the communication that --mfu contains"
    return "without communication between hosts" if gpus > GPUS_OF_SOURCE else ""


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _verdict(result: "RunEstimate", gib: float, fitting: bool) -> Iterator[str]:
    from megatron_coca.training.estimate import RESERVE

    capacity = f"{gib * (1 - RESERVE):.1f} of {gib:.1f} GiB, with {RESERVE:.0%} in reserve"
    yield f"\n{'fits' if fitting else 'DOES NOT FIT'}: {_gib(result.memory.total)} into {capacity}"
    if not fitting:
        yield "  try a higher zero_optimization.stage, a smaller train_micro_batch_size_per_gpu,"
        yield "  checkpoint_activations=true, zero_optimization.offload_optimizer.device=cpu, more GPUs,"
        yield "  or pipe_parallel_size, model_parallel_size, sequence_parallel_size or context_parallel_size"


def _advice(sizes: BatchSizes, memory: "Memory") -> str:
    """Return the advice to use fewer and larger micro-batches in a step."""
    return (
        f"  train_micro_batch_size_per_gpu={sizes.micro} gradient_accumulation_steps={sizes.accumulation} also fits: "
        f"{_gib(memory.total)}; larger micro-batches use more of a GPU"
    )
