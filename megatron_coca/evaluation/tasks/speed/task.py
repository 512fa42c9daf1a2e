"""`megatron-coca evaluate speed`: options and result files."""

from argparse import ArgumentParser
from collections.abc import Callable
from typing import Literal, get_args

from megatron_coca import methods
from megatron_coca.evaluation.declaration import Task, TaskSection
from megatron_coca.evaluation.numbers import Number
from megatron_coca.evaluation.options import add_device_options, int_list, names_of, positive_int
from megatron_coca.evaluation.results import Entry, Record, Result
from megatron_coca.support.arguments import add_conf_dir, add_source_options, expanded, local_path

KindOfWork = Literal["layer forward", "layer forward+backward", "model forward", "model forward+backward", "decode"]
KINDS_OF_WORK: tuple[KindOfWork, ...] = get_args(KindOfWork)
"""The kinds of work that `speed` times."""
METHODS = tuple(methods.TABLES["pos_emb"])


class Ratio(Record):
    """Time as a multiple of another method's time in the same round: the median and the quartiles over rounds."""

    against: str  # the other method's label
    median: float
    low: float
    high: float


class SpeedEntry(Entry):
    what: KindOfWork
    length: int  # tokens per sequence; in `decode` the number of cached tokens
    method: str
    backend: str
    seconds: float  # time of one pass, or of one token in `decode`, as the median over rounds
    quartiles: tuple[float, float]
    rounds: int
    tokens_per_second: float
    to_rope: Ratio | None  # time relative to RoPE; None: RoPE was not measured
    peak_memory_bytes: int | None  # memory beside weights and inputs; includes gradients
    cache_bytes_per_token: int | None  # per token of a sequence, over all layers; None except in `decode`

    @property
    def key(self) -> tuple[int, int, str]:
        return (KINDS_OF_WORK.index(self.what), self.length, self.method)

    @property
    def milliseconds(self) -> str:
        return f"{1000 * self.seconds:,.1f}" if self.seconds >= 0.01 else f"{1000 * self.seconds:.3g}"

    @property
    def details(self) -> str:
        """The measured numbers: time as a multiple of RoPE's, peak memory, and tokens per second."""
        shown = [f"×{self.to_rope.median:.2f}"] if self.to_rope is not None else []
        shown += [bytes_text(self.peak_memory_bytes)] if self.peak_memory_bytes is not None else []
        return " · ".join([*shown, f"{self.tokens_per_second:,.0f}/s"])


class MachineRecord(Record):
    processor: str
    threads: int
    versions: dict[str, str]


class ShapeRecord(Record):
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    parameters: int  # parameter count of the first method's model


class SpeedProtocol(Record):
    text: str
    rounds: int
    batch: int  # sequences per batch
    shape: ShapeRecord


class SpeedResult(Result):
    task: Literal["speed"] = "speed"
    protocol: SpeedProtocol
    machine: MachineRecord
    results: list[SpeedEntry]

    @property
    def setting(self) -> str:
        return f"batch {self.protocol.batch}, {self.environment.device}, {self.environment.dtype}"


def bytes_text(count: float) -> str:
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**exponent:
            return f"{count / 1024**exponent:.1f} {unit}"
    return f"{count:.0f} B"


def add_speed_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    shape = parser.add_mutually_exclusive_group(required=True)
    files = "YAML files and KEY=VALUE pairs of a run, which set the model's shape"
    shape.add_argument("--config", nargs="+", type=expanded, metavar="FILE", help=files)
    checkpoint = "checkpoint that sets the model's shape; its weights are not read"
    shape.add_argument("--checkpoint", type=expanded, metavar="DIR", help=checkpoint)
    overrides = "config overrides for all methods"
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="overrides", help=overrides)
    add("--lengths", required=True, type=int_list, metavar="N,N,...", help="sequence lengths in tokens")
    add("--methods", type=names_of(METHODS), default=["rotary", "coca"], help=", ".join(METHODS))
    add_source_options(parser)
    add_conf_dir(parser)
    variants = "name of an additional method, its YAML overlays and KEY=VALUE pairs; repeat the option for each method"
    add("--variant", nargs="+", action="append", default=[], metavar=("LABEL", "CHANGE"), help=variants)
    add("--what", type=names_of(KINDS_OF_WORK), help="work to time: " + ", ".join(KINDS_OF_WORK) + "; default: all")
    add("--batch-size", type=positive_int, default=1, metavar="N", help="sequences per batch; default: %(default)s")
    add("--rounds", type=positive_int, default=9, metavar="N", help="number of timed rounds; default: %(default)s")
    add("--label", help="name of the model's shape in reports; default: name of the configuration or checkpoint")
    add_device_options(parser)
    add("--output", type=local_path, metavar="FILE.json", help="the result file")
    add("--overwrite", action="store_true", help="replace an existing file")


def seconds_of(what: KindOfWork) -> Callable[[SpeedEntry], float | None]:
    return lambda entry: entry.seconds if entry.what == what else None


SPEED = Task(
    "speed",
    "time and memory of position methods, side by side",
    add_speed_options,
    "--config configs/350M/roformer_coca.yml --lengths 512,2048 --methods rotary,coca",
    "speed.measure.run",
    SpeedResult,
    numbers=tuple(Number(f"{what}, seconds", seconds_of(what), best="lowest") for what in KINDS_OF_WORK),
    sections=(TaskSection("speed", "Speed and memory", "speed.section.speed_blocks", place=110),),
    place=90,
    of_checkpoint=False,
)
