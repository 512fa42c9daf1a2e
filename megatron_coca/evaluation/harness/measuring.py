"""`evaluate.py lm-eval`: tasks of lm-evaluation-harness on every variant."""

import logging
from argparse import Namespace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.evaluation.harness.records import HarnessProtocol, HarnessResult, console_table, task_scores
from megatron_coca.evaluation.results import Cost, EvaluationError, Missing, Store, measured, out_of_memory
from megatron_coca.evaluation.subject import Evaluation, Header, Subject, noting_missing

if TYPE_CHECKING:
    from megatron_coca.evaluation.harness.loading import HarnessTask

logger = logging.getLogger(__name__)

PROTOCOL = (
    "tasks of lm-evaluation-harness; log-likelihoods in nats from the float32 log-softmax over the padded vocabulary, "
    "summed in float64; a text without context follows the token that ends documents; what is longer than max_length "
    "loses its beginning; generation is greedy; perplexities over disjoint windows of max_length"
)
"""Part of the identity of a result file: another text would be another measurement."""


def run(args: Namespace) -> int:
    """Measure every variant; returns the exit status. Raises EvaluationError if the harness is not installed."""
    try:
        installed = version("lm_eval")
        from megatron_coca.evaluation.harness.loading import Selection, load_tasks
    except (PackageNotFoundError, ImportError) as error:
        raise EvaluationError(
            f"evaluate.py lm-eval needs lm-evaluation-harness ({error}): pip install 'lm-eval==0.4.13'"
        ) from error
    evaluation = Evaluation(args, "lm-eval")
    evaluation.source.needed_tokenizer()
    options = {name: getattr(args, name) for name in ("num_fewshot", "limit", "seed", "bootstrap_iterations")}
    tasks = load_tasks(Selection(args.tasks, tuple(args.include_path), args.task_data, **options))

    def empty(header: Header) -> HarnessResult:
        protocol = HarnessProtocol(
            text=PROTOCOL,
            lm_eval=installed,
            max_length=args.max_length or header.checkpoint.seq_length,
            tokens_per_batch=args.tokens_per_batch,
            dynamic_length=args.dynamic_length,
            **options,
        )
        return HarnessResult(**vars(header), protocol=protocol, results=[], missing=[])

    remedy = "lower --tokens-per-batch or --max-length, or use --dtype bfloat16"
    for subject, store in evaluation.variants(empty, console_table):
        for task in [task for task in tasks if _is_needed(task, store, args.overwrite)]:
            with noting_missing(store, f"task {task.name}", remedy):
                _measure(task, subject, store)
    return evaluation.status


def _is_needed(task: "HarnessTask", store: Store[HarnessResult], overwrite: bool) -> bool:
    """Return whether the task is not in the file, or replaced by `overwrite`; a task that cannot be compared is noted.

    Raises EvaluationError if the file has scores of other documents, prompts or configurations.
    """
    from megatron_coca.evaluation.harness.loading import differences

    stored = [(cell.task, cell.fingerprint) for cell in store.result.results if cell.task in task.names]
    try:
        changes = differences(task.expected, stored) if stored else []
    except Exception as error:
        _note_fault(store, task.name, error)
        return False
    if changes and not overwrite:
        raise EvaluationError(
            f"{store.path}: holds another measurement ({'; '.join(changes)}); name another --output, or replace it "
            "with --overwrite"
        )
    return bool(changes) or store.get((task.name,)) is None


def _measure(task: "HarnessTask", subject: Subject, store: Store[HarnessResult]) -> None:
    from megatron_coca.evaluation.harness.adapter import HarnessModel
    from megatron_coca.evaluation.harness.loading import fingerprints

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
            results = task.run(model)
        measurements = fingerprints(task.loaded)
        # The cell of the given name comes last: it says that those of all of its tasks are there.
        names = [*sorted({*results["results"], *results["group_subtasks"]} - {task.name}), task.name]
        cells = [task_scores(name, results, measurements[name]) for name in names]
    except PositionRangeError:
        raise
    # A task file can run any code; the fault of one task must not stop the others.
    except Exception as error:
        if out_of_memory(error):
            raise
        _note_fault(store, task.name, error)
        return
    for cell in cells[:-1]:
        store.put(cell)
    store.put(cells[-1], Cost.of(f"task {task.name}", meter, model.tokens))


def _note_fault(store: Store[HarnessResult], name: str, error: Exception) -> None:
    from megatron_coca.evaluation.harness.loading import reason

    logger.debug("task %s", name, exc_info=error)
    missing = Missing(at=f"task {name}", kind="failed", reason=reason(error))
    if store.get((name,)) is not None:
        store.noted.append(missing)  # the file keeps its scores, but the exit status tells
    else:
        store.miss(missing)
