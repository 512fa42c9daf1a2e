"""Who makes the blocks of a preparation: one of several jobs, or a Ray cluster. Imports Ray only to use it."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_coca.console import Progress
from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.blocks import Blocks, TokenizerSource, settings_of
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Execution, Rules, check, find_inputs
from megatron_coca.data.preparation.workers import ChunkTokenizer
from megatron_coca.data.readers import open_reader

RATE_SECONDS = 3.0


def open_blocks(
    sources: Sequence[CorpusSource],
    output: Path,
    tokenizer: TokenizerSource,
    rules: Rules,
    notes: Mapping[str, Any] | None = None,
) -> Blocks:
    """Return the blocks of the preparation that ``prepare`` describes, with its tokenizer shared. Raises DataError."""
    check(sources, rules)
    blocks = Blocks(sources, Path(output), rules, settings_of(sources, tokenizer, rules, notes))
    inputs = find_inputs(sources)
    blocks.cut(inputs, blocks.share_tokenizer(tokenizer))
    return blocks


def make_part(blocks: Blocks, part: int, parts: int, execution: Execution) -> str:
    """Make every block whose number leaves ``part`` when divided by ``parts``; return how many there are.

    Raises DataError with the reason of every block that failed, after all others are made.
    """
    own = [number for number in blocks.missing() if number % parts == part]
    with Progress("tokenizing blocks", sum(map(blocks.size, own)), "B", 0, execution.progress) as progress:
        if own:
            blocks.make(own, execution.workers, progress.advance)
    return f"{blocks.folder}: {len(blocks) - len(blocks.missing())} of {len(blocks)} blocks are made"


def make_on_ray(blocks: Blocks, address: str | None, execution: Execution) -> None:
    """Make all blocks as tasks of a Ray cluster; those of a lost node are made again by others.

    Args:
        address: of the cluster, as for ``ray.init``; None starts one on this machine.
        execution: ``workers`` are the processes of a task, which reserves as many cores.

    Raises DataError with the reason of every block that failed, after all others are made.
    """
    try:
        import ray
    except ImportError:
        raise DataError("--engine ray: Ray is not installed here; pip install ray, on every node") from None
    try:
        # By default Ray's processes get what other programs leave, also in a cluster that is started here.
        own = {"_system_config": {"worker_niceness": 0}} if address is None else {}
        ray.init(address=address, include_dashboard=False, log_to_driver=False, configure_logging=False, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise DataError(f"--address {address}: no Ray cluster can be joined there ({error})") from error
    cores = max(1, execution.workers)
    task = ray.remote(num_cpus=cores, max_retries=-1)(Blocks.make)  # retries after a lost process, not after an error
    shared, missing, failed = ray.put(blocks), blocks.missing(), []
    waiting = {task.remote(shared, [number], execution.workers): number for number in missing}
    try:
        with Progress("tokenizing blocks", sum(map(blocks.size, missing)), "B", 0, execution.progress) as progress:
            while waiting:
                done, _ = ray.wait(list(waiting))
                number = waiting.pop(done[0])
                try:
                    ray.get(done[0])
                except ray.exceptions.RayTaskError as error:
                    failed.append(f"block {number + 1} of {len(blocks)}: {error.cause}")
                progress.advance(blocks.size(number))
    finally:
        ray.shutdown()
    if failed:
        raise DataError("\n".join(failed))


def plan(sources: Sequence[CorpusSource], tokenizer: TokenizerSource, rules: Rules, workers: int) -> str:
    """Describe what is to be read, and the time for it at the rate of one core, measured here for a few seconds.

    The rate is that of the first chunks; without a tokenizer, which is yet to be trained, there is none.
    """
    check(sources, rules)
    inputs = find_inputs(sources)
    lines = [
        f"{source.spec.name}: {len(units):,} units, {sum(unit.size for unit in units) / 1e9:,.3f} GB"
        for source, units in ((source, inputs.of(number)) for number, source in enumerate(sources))
    ]
    total = sum(unit.size for _, unit in inputs.units)
    if callable(tokenizer):
        return "\n".join([*lines, "The tokenizer is to be trained first, so there is no rate yet."])
    chunks = (
        (number, chunk) for number, unit in inputs.units for chunk in open_reader(sources[number].spec).chunks(unit)
    )
    made, done, begin = ChunkTokenizer(sources, tokenizer, rules), 0, time.monotonic()
    while time.monotonic() < begin + RATE_SECONDS and (following := next(chunks, None)) is not None:
        made.tokenize(*following)
        done += following[1].read
    rate = done / (time.monotonic() - begin)
    hours = total / rate / 3600 if rate else 0.0  # sizes of data sets of the Hub are unknown
    measured = f"{rate / 1e6:,.2f} MB/s on one core, measured here on the first {done / 1e6:,.1f} MB"
    return "\n".join([*lines, f"{measured}: {hours:,.2f} hours, {hours / max(1, workers):,.2f} with {workers} workers"])
