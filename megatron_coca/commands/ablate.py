"""Run an ablation: train every model in a file with every seed, evaluate all models, and write a report.

    megatron-coca ablate configs/ablations/methods.yml --scale tiny --dry-run
    megatron-coca ablate configs/ablations/methods.yml --jobs 2
    megatron-coca ablate configs/ablations/methods.yml --engine slurm --gpus 1 --time 24:00:00

Finished cells are kept, and the same command resumes after an interruption. The exit status is 2 if a
cell failed, or 1 if the same command may complete it, for example because the cell's training was killed.
"""

import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_coca.commands import command_parser
from megatron_coca.evaluation.options import DTYPES, job_count
from megatron_coca.support.arguments import local_path
from megatron_coca.support.plain_text import plain
from megatron_coca.work.engines import run as on_engine
from megatron_coca.work.parts import PART_HELP, part_of
from megatron_coca.work.settings import EngineSettings, add_engine_options, engine_of, without_engine
from megatron_coca.work.statuses import Failure, status_of
from megatron_coca.work.tasks import CommandTask

if TYPE_CHECKING:
    from megatron_coca.ablation.file import AblationFile

# PyTorch takes seconds to import, so only `run` imports it, after the options are read.


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if everything succeeded, 1 or 2 if anything failed, or 75 after a scheduler's signal.

    Raises EvaluationError, ClusterError.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(given)
    if options.only and (options.report or options.page):
        parser().error("--only: not supported with --report and --page, which need all cells; leave out --only")
    engine = engine_of(options)
    running = not (options.dry_run or options.report or options.page or options.pack)
    if not running and (engine is not None or options.part is not None):
        parser().error("--engine, --part: not supported with an option that runs no cell; leave one of them out")
    if engine is not None and options.part is not None:
        parser().error("--part: not supported with --engine, which sets it; leave out --part")
    from megatron_coca.work.statuses import Stopped

    try:
        return run(options) if engine is None else run_on(engine, options, given)
    except Stopped as error:
        print(f"megatron-coca ablate: {error}", file=sys.stderr)
        return error.status


def parser() -> ArgumentParser:
    parser = command_parser("ablate", __doc__)
    add = parser.add_argument
    add("file", type=local_path, metavar="FILE", help="YAML file of models, seeds and tasks; see docs/ablations.md")
    add("--scale", metavar="NAME", help="one of the file's `scales`; default: the first")
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="run only these models, cells, or seeds such as s1234, and write no report",
    )
    sweep = "run the sweep of learning rates that the file declares in `rates`, instead of its models"
    add("--rates", action="store_true", help=sweep)
    add("--part", type=part_of, metavar="I/N", help=f"run every N-th cell only, and write no report; {PART_HELP}")
    jobs = "number of cells to run at the same time; they share the cores and GPUs; default: %(default)s"
    add("--jobs", type=job_count, default=1, metavar="N", help=jobs)
    add("--output", type=local_path, metavar="DIR", help="folder for results instead of the file's `results`")
    add("--runs", type=local_path, metavar="DIR", help="folder for training runs instead of the file's `runs`")
    instead = parser.add_mutually_exclusive_group()
    dry_run = "print the cells with their parameters and tokens, without running anything"
    instead.add_argument("--dry-run", action="store_true", help=dry_run)
    report = "write a report on the finished cells, without running anything"
    instead.add_argument("--report", action="store_true", help=report)
    page = "render a Jinja2 template with tables and plots of the finished cells; see docs/ablations.md"
    instead.add_argument("--page", type=local_path, nargs=2, metavar=("TEMPLATE", "PAGE"), help=page)
    pack = "pack all results into RESULTS.jsonl.zst, beside the results folder, without running anything"
    instead.add_argument("--pack", action="store_true", help=pack)
    papers = "add all published numbers to the report, or none; default: those with our lengths and protocol"
    add("--papers", action=BooleanOptionalAction, help=papers)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device for training and evaluation")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="dtype for evaluation")
    add_engine_options(parser)
    return parser


def run_on(engine: EngineSettings, options: Namespace, given: Sequence[str]) -> int:
    """Run each unfinished cell in a separate task of an engine. Then rerun failed cells, and write the report.

    Return the exit status.
    """
    from megatron_coca.ablation import cells as files
    from megatron_coca.ablation import grid

    file, _ = _file_of(options)
    files.unpack(file.results)
    cells = grid.select(grid.expand(file, options.device, options.dtype), options.only)
    parts = min(engine.tasks or len(cells), len(cells))
    open_cells = [number for number, cell in enumerate(cells) if files.state_of(cell) is not files.State.DONE]
    line = ("ablate", *without_engine(given))
    step = CommandTask(line, Path.cwd(), parts, tuple(sorted({number % parts for number in open_cells})))
    finish = None if options.only else CommandTask(line, Path.cwd())
    return on_engine(engine, step, finish, file.results.with_name(f".{file.results.name}.tasks"))


def _absent_data(absent: Sequence[str]) -> list[str]:
    """Return lines that list the data which are not on this machine."""
    if not absent:
        return []
    said = "These data are not on this machine, so the cells that need them have no full names and no states yet:"
    return ["", said, *(f"- {line}" for line in dict.fromkeys(absent))]


def _file_of(options: Namespace) -> "tuple[AblationFile, list[str]]":
    """Return the ablation to run, and notes for its plan. With --rates, the ablation is the file's sweep of learning
    rates. Otherwise it is the ablation in the file, with the rates that the sweep has found. Raises EvaluationError.
    """
    from megatron_coca.ablation import rates
    from megatron_coca.ablation.file import read_ablation
    from megatron_coca.evaluation.results import EvaluationError

    file = read_ablation(options.file, options.scale, options.output, options.runs)
    if options.rates:
        return rates.sweep_of(file), []
    if file.rates is None or options.pack:
        return file, []
    try:
        found = rates.found_rates(file)
    except EvaluationError as error:
        if not options.dry_run:
            raise
        return rates.middle_rates(file), ["", f"The rates of this plan are those in the middle of the sweep. {error}"]
    chosen = [f"- {label}: {rate:g}" for label, rate in found.items()]
    return rates.with_rates(file, found), ["", "Learning rates of the sweep:", *chosen]


def run(options: Namespace) -> int:
    """Run the command with these options. Raises EvaluationError, Stopped, KeyboardInterrupt."""
    from megatron_coca.ablation import cells as files
    from megatron_coca.ablation import declared, grid, reporting, running
    from megatron_coca.evaluation.options import resolve_device
    from megatron_coca.evaluation.results import EvaluationError

    file, notes = _file_of(options)
    files.unpack(file.results)
    if options.pack:
        print(f"wrote {files.pack(file.results)}")
        return 0
    recorded = files.recorded_data(file.results) if options.report or options.page or options.dry_run else None
    absent: list[str] | None = [] if options.dry_run else None  # a plan needs no data
    if options.report and not any(file.results.glob(f"*/{files.RECORD}")):
        raise EvaluationError(
            f"{file.results}: no results yet; run the ablation first, or look at --output and --scale"
        )
    everything = grid.expand(file, options.device, options.dtype, recorded, absent)
    cells = grid.select(everything, options.only)
    if options.part is not None:
        part, parts = options.part
        cells = cells[part::parts]
    if absent is not None:
        print(plain("\n".join([files.overview(cells), *declared.plan(file), *notes, *_absent_data(absent)])))
        return 0
    if options.page is not None:
        template, page = options.page
        scale = partial(reporting.figures_of_scale, options.file)
        reporting.write_page(file, everything, template, page, scale)
        return 0
    failures = []
    if not options.report:
        resolve_device(options.device)
        failures = running.run_cells(cells, running.Machine.here(options.device), options.jobs)
        print(f"\n{files.overview(cells)}")
    if options.report or not (options.only or options.part):
        try:
            print(plain(f"\n{reporting.write_report(file, everything, options.papers)}"))
        except EvaluationError as error:  # the failed cells are still listed below
            failures.append(Failure(f"report: {error}"))
    for failure in failures:
        print(plain(f"megatron-coca ablate: {failure.reason}"), file=sys.stderr)
    return status_of(failures)
