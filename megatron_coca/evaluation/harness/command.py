"""`python evaluate.py lm-eval`."""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_coca.evaluation.harness.records import HarnessProtocol, HarnessResult
from megatron_coca.evaluation.harness.scores import task_scores
from megatron_coca.evaluation.markdown import format_table
from megatron_coca.evaluation.measure import measured
from megatron_coca.evaluation.options import add_subject_options, positive_int
from megatron_coca.evaluation.results import EvaluationError, Missing
from megatron_coca.evaluation.running import Task, run_subjects, within_memory
from megatron_coca.evaluation.store import Cost, Store
from megatron_coca.evaluation.subject import Header, Source, Subject

PROTOCOL = (
    "tasks of lm-evaluation-harness; log-likelihoods in nats from the float32 log-softmax over the padded vocabulary, "
    "summed in float64; a text without context follows the token that ends documents; what is longer than max_length "
    "loses its beginning; generation is greedy; perplexities over disjoint windows of max_length"
)


@dataclass(frozen=True)
class Harness:
    """The same tasks for every subject."""

    suites: list[Any]  # of suite.Suite, which needs lm_eval
    protocol: dict[str, Any]
    max_length: int | None

    def empty(self, header: Header) -> HarnessResult:
        """As in `running.Measurement`."""
        length = self.max_length or header.checkpoint.seq_length
        protocol = HarnessProtocol(**self.protocol, max_length=length)
        return HarnessResult(**header.fields(), protocol=protocol, results=[], missing=[])

    def measure(self, subject: Subject, store: Store[HarnessResult]) -> None:
        """One name after another; what is known of each is written. A group's own cell comes last: it says that all
        of its tasks are there.
        """
        remedy = "lower --tokens-per-batch or --max-length, or use --dtype bfloat16"
        for suite in self.suites:
            if not store.has((suite.name,)):
                with within_memory(store, f"task {suite.name}", remedy):
                    self._run(subject, store, suite)

    def _run(self, subject: Subject, store: Store[HarnessResult], suite: Any) -> None:
        from megatron_coca.evaluation.harness.adapter import HarnessModel

        assert subject.tokenizer is not None, "checked before anything is loaded"
        protocol = store.result.protocol
        model = HarnessModel(
            subject.model, subject.tokenizer, protocol.max_length, protocol.tokens_per_batch, subject.vocab_size
        )
        try:
            with measured(subject.device) as meter:
                found = suite.run(model)
        except EvaluationError as error:
            store.miss(Missing(at=f"task {suite.name}", kind="failed", reason=str(error)))
            return
        for name in sorted({*found["results"], *found["group_subtasks"]} - {suite.name}):
            store.put(task_scores(name, found))
        cost = Cost.of(f"task {suite.name}", meter, model.tokens)
        store.put(task_scores(suite.name, found), cost)

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
        return f"{header}\n\n{format_table(names, rows)}\n"


def add_arguments(parser: ArgumentParser) -> None:
    """The options of the subcommand."""
    add_subject_options(parser)
    add = parser.add_argument
    add("--tasks", required=True, type=_names, metavar="NAME,NAME,...", help="tasks, groups or tags of the harness")
    folders = "folders of further task files (*.yaml)"
    add("--include-path", nargs="+", type=Path, default=[], metavar="DIR", help=folders)
    places = "folder of the documents of tasks that come with this project, NAME.jsonl each"
    add("--task-data", type=Path, metavar="DIR", help=places)
    add("--num-fewshot", type=_count, metavar="N", help="examples before each document; default: what the task says")
    add("--limit", type=positive_int, metavar="N", help="only the first N documents of each task")
    add("--max-length", type=positive_int, metavar="N", help="tokens read at most; default: the training length")
    add("--tokens-per-batch", type=positive_int, default=16384, metavar="N", help="fewer need less memory")
    add("--seed", type=_count, default=1234, metavar="N", help="of the choice of examples")
    errors = "of standard errors that have no formula"
    add("--bootstrap-iterations", type=positive_int, default=1000, metavar="N", help=errors)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, text.split(","))))


def _count(text: str) -> int:
    return 0 if text.strip() == "0" else positive_int(text)


def run(args: Namespace) -> int:
    """Measures every variant; returns the exit status. Raises EvaluationError where the harness is not installed."""
    try:
        installed = version("lm_eval")
        from megatron_coca.evaluation.harness.suite import Selection, load_suites
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
    }

    def begin(source: Source) -> Harness:
        if source.tokenizer is None:
            raise EvaluationError(f"{args.checkpoint}: carries no tokenizer, and tasks are texts; use one that does")
        return Harness(load_suites(selection), protocol, args.max_length)

    return run_subjects(args, "lm-eval", begin)


LM_EVAL = Task("tasks of lm-evaluation-harness", add_arguments, run)
