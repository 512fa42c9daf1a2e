"""`megatron-coca evaluate lm-eval`: run tasks of lm-evaluation-harness on every variant and write result files."""

import logging
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.evaluation.chats import ChatRecord, chat_record
from megatron_coca.evaluation.options import subject_options
from megatron_coca.evaluation.results import (
    Cost,
    Entry,
    EvaluationError,
    Missing,
    Record,
    Result,
    Show,
    Store,
    measured,
    out_of_memory,
)
from megatron_coca.evaluation.subject import Evaluation, Subject, noting_missing
from megatron_coca.evaluation.tasks.lm_eval_files import config_hash, inputs_hash
from megatron_coca.evaluation.tasks.lm_eval_prompts import InputLimits, PromptEncoding
from megatron_coca.evaluation.tasks.lm_eval_samples import LoggedFile, log_samples
from megatron_coca.model import DynamicLength

logger = logging.getLogger(__name__)

PROTOCOL = (
    "tasks of lm-evaluation-harness; log-likelihoods in nats from the float32 log-softmax over the padded vocabulary, "
    "summed in float64; a text without context follows the token that ends documents; what is longer than max_length "
    "loses its beginning; generation is greedy; perplexities over disjoint windows of max_length"
)
"""Part of the identity of a result file: if this string changes, earlier files are not resumed."""


NOT_MEASURED = -1.0
"""The value that the harness reports for a score it did not measure, such as a length without samples in ruler."""


class Score(Record):
    metric: str
    filter: str
    value: float | None  # None if the score was not measured
    stderr: float | None  # None if the harness reports no standard error
    higher_is_better: bool | None


class TaskScores(Entry):
    """Scores of one task of the harness, or means over the tasks of one group."""

    task: str
    version: str | None
    num_fewshot: int | None  # number of examples; None for a group if its tasks differ
    samples: int  # number of scored documents
    config_sha256: str  # hash of the configuration in the task's file, without paths; empty for a task in a group
    inputs_sha256: str  # hash of code, local data and subtasks
    documents_sha256: str | None  # hash of the documents in order; None for a group
    prompts_sha256: str | None  # hash of each document's first prompt, including examples; None for a group
    cut: int = 0  # samples with a prompt that exceeded the limit and lost its beginning
    scores: list[Score]
    logged: list[LoggedFile] = []  # logs of the task or of all tasks of the group; empty without --log-samples

    @property
    def key(self) -> tuple[str]:
        return (self.task,)


class HarnessProtocol(Record):
    text: str
    lm_eval: str  # version of the harness
    max_length: int | None  # None: no limit
    num_fewshot: int | None  # None: each task's own number
    limit: int | None
    seed: int
    tokens_per_batch: int
    dynamic_length: DynamicLength = "total"
    start: int | None = None  # token id put before every text
    rolling_window: int | None = None  # window of rolling log-likelihoods; None: max_length
    adds: bool = False  # whether the tokens that the model's own library adds are put around every text
    closes: int | None = None  # the token added after every text, if the tokenizer's settings ask for one
    names_tokens: bool = False  # whether names of special tokens in prompts become these tokens
    prefix: int | None = None  # token before a text without context; None: start, or the end-of-document token
    ends: list[int] = []  # tokens that end an answer; empty: only the end-of-document token
    chat: ChatRecord | None = None  # None: prompts are plain text


class HarnessResult(Result):
    task: Literal["lm-eval"] = "lm-eval"
    protocol: HarnessProtocol
    results: list[TaskScores]


def run(args: Namespace, show: Show) -> int:
    """Measure every variant and return the exit status. Raises EvaluationError if lm-evaluation-harness is missing."""
    try:
        installed = version("lm_eval")
        from megatron_coca.evaluation.tasks.lm_eval_model import index_tasks
    except (PackageNotFoundError, ImportError) as error:
        raise EvaluationError(
            f"lm-eval: lm-evaluation-harness is not installed ({error}); run pip install 'lm-eval==0.4.13'"
        ) from error
    if args.log_samples and args.output is None:
        raise EvaluationError("--log-samples: needs --output, because samples are written next to it; add --output")
    evaluation = Evaluation(subject_options(args), "lm-eval", show)
    encoding, protocol = prepare(evaluation, args, installed)
    manager = index_tasks(args.tasks, args.include_path)
    indexed = [(name, manager.task_index[name]) for name in args.tasks]
    names = [one for name, known in indexed for one in (sorted(known.tags) if known.kind.name == "TAG" else [name])]
    remedy = "lower --tokens-per-batch or --max-length, or use --dtype bfloat16"
    for subject, store in evaluation.variants(HarnessResult, protocol=protocol):
        for name in dict.fromkeys(names):
            earlier = store.get((name,))
            if earlier is not None and (changed := _changed(earlier, manager)) is None:
                if not args.log_samples or _is_logged(earlier, store):
                    continue
            elif earlier is not None and not args.overwrite:
                raise EvaluationError(
                    f"{store.path}: contains another measurement ({changed} of task {name} changed); name another "
                    "--output, or replace the file with --overwrite"
                )
            with noting_missing(store, f"task {name}", remedy):
                _measure(name, manager, subject, store, encoding, args.log_samples)
    return evaluation.status


def prepare(evaluation: Evaluation, args: Namespace, installed: str) -> tuple[PromptEncoding, HarnessProtocol]:
    """Return the prompt encoding and the protocol that records it, for version `installed` of the harness."""
    tokenizer, trained = evaluation.needed_tokenizer(), evaluation.opened.trained
    chat = chat_record(args, tokenizer)
    adds = args.start_token is None and evaluation.untrained and tokenizer.encode_prompt("", add=True) != []
    start = None if adds or args.start_token == "" else evaluation.start_token(args.start_token)
    begun = evaluation.untrained or tokenizer.chat is not None
    encoding = PromptEncoding(tokenizer, start, adds, chat is not None, begun)
    longest = args.max_length
    if longest is None and trained.position.embedding.weights == "table":
        longest = trained.model.max_position_embeddings  # no model supports positions beyond its table
    protocol = HarnessProtocol(
        text=PROTOCOL,
        lm_eval=installed,
        max_length=longest,
        rolling_window=trained.model.seq_length if args.max_length is None else None,
        tokens_per_batch=args.tokens_per_batch,
        dynamic_length=args.dynamic_length,
        start=start,
        adds=adds,
        closes=tokenizer.eos if adds and tokenizer.rules.add_eos else None,
        names_tokens=tokenizer.names_tokens,
        prefix=None if encoding.prefix in (start, tokenizer.eod) else encoding.prefix,
        ends=[] if encoding.ends == (tokenizer.eod,) else [*encoding.ends],
        chat=chat,
        **{name: getattr(args, name) for name in ("num_fewshot", "limit", "seed")},
    )
    return encoding, protocol


def _is_logged(entry: TaskScores, store: Store[HarnessResult]) -> bool:
    return store.path is not None and bool(entry.logged) and all(file.intact(store.path) for file in entry.logged)


def _changed(earlier: TaskScores, manager: Any) -> str | None:
    """Return which part of a task or group has changed since its scores were measured, or None."""
    if earlier.config_sha256 != config_hash(manager, earlier.task):
        return "the configuration"
    if earlier.inputs_sha256 != inputs_hash(manager, earlier.task):
        return "a code, data or task file"
    return None


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _measure(
    name: str, manager: Any, subject: Subject, store: Store[HarnessResult], encoding: PromptEncoding, log: bool
) -> None:
    from megatron_coca.evaluation.tasks.lm_eval_model import HarnessModel, evaluate_task

    given = store.result.protocol
    window = given.rolling_window or given.max_length
    assert window is not None, "rolling_window or max_length is set"
    model = HarnessModel(
        subject.model,
        encoding,
        InputLimits(given.max_length, window),
        given.tokens_per_batch,
        subject.vocab_size,
        given.dynamic_length,
    )
    chat = None
    if given.chat is not None:
        chat = {"system_instruction": given.chat.system, "fewshot_as_multiturn": given.chat.multiturn}
    try:
        with measured(subject.device) as meter:
            results = evaluate_task(model, manager, name, given.num_fewshot, given.limit, given.seed, chat)
        logged = log_samples(store.path, results["samples"], model.cut) if log and store.path is not None else {}
        # The requested task or group comes last, so that its entry implies that the entries of its subtasks are stored.
        names = [*sorted({*results["results"], *results["group_subtasks"]} - {name}), name]
        hashes = [(config_hash(manager, each), inputs_hash(manager, each)) for each in names]
        entries = [
            task_scores(each, results, *both, model.cut, logged) for each, both in zip(names, hashes, strict=True)
        ]
    except PositionRangeError:
        raise
    # A task file can run any code, and an error in one task must not stop the others.
    except Exception as error:
        if out_of_memory(error):
            raise
        logger.debug("task %s", name, exc_info=error)
        store.miss(Missing(at=f"task {name}", kind="failed", reason=reason(error)))
        return
    for entry in entries:
        if entry.cut and entry.documents_sha256 is not None:
            logger.warning(
                "%s: task %s: prompts of %d of %d samples exceed --max-length %s and lost their beginning; raise "
                "--max-length, or do not compare the score",
                *(subject.label, entry.task, entry.cut, entry.samples, given.max_length),
            )
    for entry in entries[:-1]:
        store.put(entry)
    store.put(entries[-1], Cost.of(f"task {name}", meter, model.tokens))


def reason(error: BaseException) -> str:
    """Return the types and messages of an error and its causes in one line; for EvaluationError only the message."""
    if isinstance(error, EvaluationError):
        return str(error)
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(f"{type(cause).__name__}: {' '.join(str(cause).split())}")
        cause = cause.__cause__
    return "; caused by ".join(texts)


def task_scores(
    name: str,
    results: dict[str, Any],
    config_sha256: str,
    inputs_sha256: str,
    cut: Mapping[str, Collection[int]],
    logged: Mapping[str, LoggedFile],
) -> TaskScores:
    """Return the entry of a task or group; `cut` maps each task to its documents with a truncated prompt."""
    samples = sorted(results["samples"].get(name, ()), key=lambda sample: sample["doc_id"])
    version = results["versions"].get(name)
    shots = results["n-shot"].get(name)
    tasks = _tasks_of(name, results)
    return TaskScores(
        task=name,
        version=None if version in (None, "Yaml") else str(version),  # "Yaml" means that the task's file has no version
        num_fewshot=shots if isinstance(shots, int) else None,
        samples=sum(results["n-samples"][task]["effective"] for task in tasks),
        config_sha256=config_sha256,
        inputs_sha256=inputs_sha256,
        documents_sha256=_hash_of(samples, "doc_hash"),
        prompts_sha256=_hash_of(samples, "prompt_hash"),
        cut=sum(len(cut.get(task, ())) for task in tasks),
        scores=_scores(name, results),
        logged=[logged[task] for task in tasks if task in logged],
    )


def _scores(name: str, results: dict[str, Any]) -> list[Score]:
    metrics = results["results"].get(name, {})
    higher_is_better = results["higher_is_better"].get(name, {})
    scores = []
    for key in sorted(metrics):
        metric, _, filtered = key.partition(",")
        if key in ("alias", "name", "sample_len", "sample_count") or metric.endswith("_stderr"):
            continue
        absent = any(_is_absent(task, metric, key, results) for task in _tasks_of(name, results))
        stderr = metrics.get(f"{metric}_stderr,{filtered}")
        scores.append(
            Score(
                metric=metric,
                filter=filtered,
                value=None if absent else float(metrics[key]),
                stderr=float(stderr) if isinstance(stderr, int | float) and not absent else None,
                higher_is_better=higher_is_better.get(metric),
            )
        )
    return scores


def _is_absent(task: str, metric: str, key: str, results: dict[str, Any]) -> bool:
    """Return True if a task's score is `NOT_MEASURED` because the score of every sample is."""
    found = [sample[metric] for sample in results["samples"].get(task, ()) if metric in sample]
    at_all = results["results"].get(task, {}).get(key) == NOT_MEASURED
    return at_all and bool(found) and all(isinstance(one, int | float) and one == NOT_MEASURED for one in found)


def _tasks_of(name: str, results: dict[str, Any]) -> list[str]:
    """Return all tasks of a group, including those of nested groups; for a task, return only its name."""
    if name in results["n-samples"]:
        return [name]
    return [task for child in results["group_subtasks"].get(name, ()) for task in _tasks_of(child, results)]


def _hash_of(samples: Sequence[dict[str, Any]], field: str) -> str | None:
    return _hash("".join(sample[field] for sample in samples)) if samples else None
