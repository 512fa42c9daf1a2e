"""`evaluate.py speed`: time and memory of position methods, measured side by side in one run."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

from megatron_coca.config.position import PositionMethod

HELP = "time and memory of position methods, side by side"
What = Literal["layer forward", "layer forward+backward", "model forward", "model forward+backward", "decode"]
WHATS: tuple[What, ...] = get_args(What)
"""The kinds of work that are timed."""
CONTRACTION = "contraction"
"""CoCA as its paper computes it, among the values of `--methods`."""
METHODS = (*get_args(PositionMethod), CONTRACTION)
WHOLE_SEQUENCES = "the contraction computes whole sequences only"
"""Why the contraction has no cells of decoding."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the options of the subcommand."""
    from megatron_coca.evaluation.options import DTYPES, int_list, positive_int

    add = parser.add_argument
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--config", nargs="+", type=Path, metavar="FILE", help="the model's shape: a run's YAML files")
    shape.add_argument(
        "--checkpoint", metavar="DIR", help="the model's shape: a checkpoint, whose weights are not read"
    )
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="overrides", help="for all methods")
    add("--lengths", required=True, type=int_list, metavar="N,N,...", help="tokens of a row")
    add("--methods", type=_names(METHODS), default=["rotary", "coca", CONTRACTION], help=", ".join(METHODS))
    variants = "one more method: its name, then YAML overlays and KEY=VALUE; may be repeated"
    add("--variant", nargs="+", action="append", default=[], metavar=("LABEL", "CHANGE"), help=variants)
    add("--what", type=_names(WHATS), help="some of " + ", ".join(WHATS) + "; default: all")
    add("--batch-size", type=positive_int, default=1, metavar="N", help="rows; default 1")
    add("--rounds", type=positive_int, default=9, metavar="N", help="timed rounds; default 9")
    budget = "skip a method's lengths whose rounds would take longer; default 600"
    add("--budget-seconds", type=_seconds, default=600.0, metavar="S", help=budget)
    add("--no-memory", action="store_true", help="on the CPU, skip the memory, which takes a process for each method")
    add("--label", help="the name of the shape in reports; default: the configuration's or checkpoint's name")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="float32", choices=DTYPES, help="of weights and computation")
    add("--output", type=Path, metavar="FILE.json", help="the result file")
    add("--overwrite", action="store_true", help="replace an existing file")


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        given = [name.strip() for name in text.split(",")]
        if unknown := [name for name in given if name not in known]:
            raise ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return given

    return names


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def run(args: Namespace) -> int:
    """Measures and prints; returns the exit status. Raises EvaluationError, ConfigError, CheckpointError."""
    # Not at the top: the options are declared without PyTorch.
    from megatron_coca.evaluation.speed.measuring import run as measure_speed

    return measure_speed(args)
