"""The tasks of one call on one subject after another."""

import logging
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.evaluation.harness.loading import reason
from megatron_coca.evaluation.harness.records import HarnessProtocol, HarnessResult, TaskScores, task_scores
from megatron_coca.evaluation.options import (
    add_dynamic_length_option,
    add_subject_options,
    dynamic_length_text,
    positive_int,
    whole_number,
)
from megatron_coca.evaluation.results import Cost, EvaluationError, Missing, Store, measured, out_of_memory
from megatron_coca.evaluation.subject import EvaluatedCheckpoint, Header, Subject, Task, noting_missing, run_subjects
from megatron_coca.tables import format_table

logger = logging.getLogger(__name__)

MEMORY_REMEDY = "lower --tokens-per-batch or --max-length, or use --dtype bfloat16"


@dataclass(frozen=True)
class Harness:
    """The same tasks for every subject.

    Attributes:
        suites: of `suite.Suite` or `suite.Unloaded`, which need lm_eval.
        protocol: of the result file, `max_length` aside.
        max_length: tokens read at most; None for the training length.
        overwrite: scores of other documents, prompts or configurations in the file are replaced.
    """

    suites: list[Any]
    protocol: dict[str, Any]
    max_length: int | None
    overwrite: bool = False

    def empty(self, header: Header) -> HarnessResult:
        """As in `running.Measurement`."""
        length = self.max_length or header.checkpoint.seq_length
        protocol = HarnessProtocol(**self.protocol, max_length=length)
        return HarnessResult(**header.fields(), protocol=protocol, results=[], missing=[])

    def measure(self, subject: Subject, store: Store[HarnessResult]) -> None:
        """One name after another; what is known of each is written. A group's own cell comes last: it says that all
        of its tasks are there.

        Raises EvaluationError where the file has scores of these tasks on other documents, prompts or configurations.
        """
        for suite in list(self._unmeasured(store)):
            with noting_missing(store, f"task {suite.name}", MEMORY_REMEDY):
                self._run(subject, store, suite)

    def _unmeasured(self, store: Store[HarnessResult]) -> Iterator[Any]:
        from megatron_coca.evaluation.harness.loading import unlike

        for suite in self.suites:
            held = [(cell.task, cell.fingerprint) for cell in store.result.results if cell.task in suite.names]
            try:
                others = unlike(suite.expected, held) if held else []
            except Exception as error:
                _note(store, suite.name, error)
                continue
            if others and not self.overwrite:
                raise EvaluationError(
                    f"{store.path}: holds another measurement ({'; '.join(others)}); name another --output, or replace "
                    "it with --overwrite"
                )
            if others or not store.has((suite.name,)):
                yield suite

    def _run(self, subject: Subject, store: Store[HarnessResult], suite: Any) -> None:
        from megatron_coca.evaluation.harness.adapter import HarnessModel

        assert subject.tokenizer is not None, "checked before anything is loaded"
        protocol = store.result.protocol
        model = HarnessModel(
            subject.model,
            subject.tokenizer,
            protocol.max_length,
            protocol.tokens_per_batch,
            subject.vocab_size,
            protocol.dynamic_length,
        )
        try:
            with measured(subject.device) as meter:
                found = suite.run(model)
            cells = _cells(suite, found)
        except PositionRangeError:
            raise
        # Files of tasks run what they like; one task's fault is not the others'.
        except Exception as error:
            if out_of_memory(error):
                raise
            _note(store, suite.name, error)
            return
        for cell in cells[:-1]:
            store.put(cell)
        store.put(cells[-1], Cost.of(f"task {suite.name}", meter, model.tokens))

    def table(self, result: HarnessResult) -> str:
        """As in `running.Measurement`."""
        rows = [
            [
                each.task,
                "-" if each.num_fewshot is None else str(each.num_fewshot),
                score.filter,
                score.metric,
                f"{score.value:.4f}",
                "-" if score.stderr is None else f"{score.stderr:.4f}",
                str(each.samples),
            ]
            for each in result.results
            for score in each.scores
        ]
        header = f"{result.label}: trained at {result.checkpoint.seq_length}, up to {result.protocol.max_length} tokens"
        names = ["task", "shots", "filter", "metric", "value", "stderr", "documents"]
        seen = dynamic_length_text(result.protocol.dynamic_length)
        return f"{header}\n\n{format_table(names, rows)}\n\n{seen}\n"


def _cells(suite: Any, found: dict[str, Any]) -> list[TaskScores]:
    """One for each task and group, that of the suite's own name last."""
    for problem in suite.not_computed(found):
        logger.warning("%s", problem)
    fingerprints = suite.measured()
    others = sorted({*found["results"], *found["group_subtasks"]} - {suite.name})
    return [task_scores(name, found, fingerprints[name]) for name in [*others, suite.name]]


def _note(store: Store[HarnessResult], name: str, error: Exception) -> None:
    logger.debug("task %s", name, exc_info=error)
    missing = Missing(at=f"task {name}", kind="failed", reason=reason(error))
    if store.has((name,)):
        # The file keeps the scores that it has; that they could not be compared or replaced is told all the same.
        store.noted.append(missing)
    else:
        store.miss(missing)


PROTOCOL = (
    "tasks of lm-evaluation-harness; log-likelihoods in nats from the float32 log-softmax over the padded vocabulary, "
    "summed in float64; a text without context follows the token that ends documents; what is longer than max_length "
    "loses its beginning; generation is greedy; perplexities over disjoint windows of max_length"
)


def add_arguments(parser: ArgumentParser) -> None:
    """The options of the subcommand."""
    add_subject_options(parser)
    add = parser.add_argument
    add("--tasks", required=True, type=_names, metavar="NAME,NAME,...", help="tasks, groups or tags of the harness")
    folders = "folders of further task files (*.yaml)"
    add("--include-path", nargs="+", type=Path, default=[], metavar="DIR", help=folders)
    places = "folder of the documents of tasks that come with this project, NAME.jsonl each"
    add("--task-data", type=Path, metavar="DIR", help=places)
    add(
        "--num-fewshot",
        type=whole_number,
        metavar="N",
        help="examples before each document; default: what the task says",
    )
    add("--limit", type=positive_int, metavar="N", help="only the first N documents of each task")
    add("--max-length", type=positive_int, metavar="N", help="tokens read at most; default: the training length")
    add("--tokens-per-batch", type=positive_int, default=16384, metavar="N", help="fewer need less memory")
    add_dynamic_length_option(parser)
    add("--seed", type=whole_number, default=1234, metavar="N", help="of the choice of examples")
    errors = "of standard errors that have no formula"
    add("--bootstrap-iterations", type=positive_int, default=1000, metavar="N", help=errors)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))
    if not names:
        raise ArgumentTypeError(f"{text!r} names no task; give NAME,NAME,...")
    return names


def run(args: Namespace) -> int:
    """Measures every variant; returns the exit status. Raises EvaluationError where the harness is not installed."""
    try:
        installed = version("lm_eval")
        from megatron_coca.evaluation.harness.loading import Selection, load_suites
    except (PackageNotFoundError, ImportError) as error:
        raise EvaluationError(
            f"evaluate.py lm-eval needs lm-evaluation-harness ({error}): pip install 'lm-eval==0.4.13'"
        ) from error

    selection = Selection(
        names=args.tasks,
        include=tuple(args.include_path),
        data=args.task_data,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        seed=args.seed,
        bootstrap_iterations=args.bootstrap_iterations,
    )
    protocol = {
        "text": PROTOCOL,
        "lm_eval": installed,
        "num_fewshot": args.num_fewshot,
        "limit": args.limit,
        "seed": args.seed,
        "bootstrap_iterations": args.bootstrap_iterations,
        "tokens_per_batch": args.tokens_per_batch,
        "dynamic_length": args.dynamic_length,
    }

    def begin(source: EvaluatedCheckpoint) -> Harness:
        if source.tokenizer is None:
            raise EvaluationError(f"{args.checkpoint}: carries no tokenizer, and tasks are texts; use one that does")
        return Harness(load_suites(selection), protocol, args.max_length, args.overwrite)

    return run_subjects(args, "lm-eval", begin)


LM_EVAL = Task("tasks of lm-evaluation-harness", add_arguments, run)
