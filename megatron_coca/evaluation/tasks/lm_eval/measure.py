"""`megatron-coca evaluate lm-eval`: run tasks of lm-evaluation-harness on every variant and write result files."""

import logging
from argparse import Namespace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.evaluation.chats import chat_record
from megatron_coca.evaluation.options import subject_options
from megatron_coca.evaluation.results import Cost, EvaluationError, Missing, Show, Store, measured, out_of_memory
from megatron_coca.evaluation.subject import Evaluation, Subject, noting_missing
from megatron_coca.evaluation.tasks.lm_eval.files import config_hash, inputs_hash, task_names
from megatron_coca.evaluation.tasks.lm_eval.prompts import InputLimits, PromptEncoding
from megatron_coca.evaluation.tasks.lm_eval.samples import log_samples
from megatron_coca.evaluation.tasks.lm_eval.scores import TaskScores, task_scores
from megatron_coca.evaluation.tasks.lm_eval.task import TRUNCATED_PARTS, HarnessProtocol, HarnessResult

logger = logging.getLogger(__name__)

PROTOCOL = (
    "tasks of lm-evaluation-harness; log-likelihoods in nats from the float32 log-softmax over the padded vocabulary, "
    "summed in float64; a text without context follows the token that ends documents; what is longer than max_length "
    "loses its beginning; generation is greedy; perplexities over disjoint windows of max_length"
)
"""Part of the identity of a result file: if this string changes, earlier files are not resumed."""

TOKENIZER = "tokenizer"
"""The key of `--metadata` that names the tokenizer of tasks that generate prompts. The default is the model's."""


def run(args: Namespace, show: Show) -> int:
    """Measure every variant and return the exit status. Raises EvaluationError if lm-evaluation-harness is missing."""
    try:
        installed = version("lm_eval")
        from megatron_coca.evaluation.tasks.lm_eval.model import index_tasks
    except (PackageNotFoundError, ImportError) as error:
        raise EvaluationError(
            f"lm-eval: lm-evaluation-harness is not installed ({error}); run pip install 'lm-eval==0.4.13'"
        ) from error
    if args.log_samples and args.output is None:
        raise EvaluationError("--log-samples: needs --output, because samples are written next to it; add --output")
    evaluation = Evaluation(subject_options(args), "lm-eval", show)
    if args.datasets is not None and not args.datasets.is_dir():
        raise EvaluationError(f"--datasets {args.datasets}: no such folder; make it with tools/fetch_benchmarks.py")
    encoding, protocol = prepare(evaluation, args, installed)
    own = {TOKENIZER: encoding.tokenizer.fingerprint}
    manager = index_tasks(args.tasks, args.include_path, own | args.metadata, args.plain_tasks)
    plain = sorted({leaf for name in args.plain_tasks for leaf in task_names(manager, name)})
    protocol = protocol.model_copy(update={"plain_tasks": plain})
    indexed = [(name, manager.task_index[name]) for name in args.tasks]
    names = [one for name, known in indexed for one in (sorted(known.tags) if known.kind.name == "TAG" else [name])]
    remedy = "lower --tokens-per-batch or --max-length, or use --dtype bfloat16"
    for subject, store in evaluation.variants(HarnessResult, protocol=protocol):
        for name in dict.fromkeys(names):
            earlier = store.get((name,))
            if earlier is not None and (changed := _changed(earlier, manager, args.datasets)) is None:
                if not args.log_samples or _is_logged(earlier, store):
                    continue
            elif earlier is not None and not args.overwrite:
                raise EvaluationError(
                    f"{store.path}: contains another measurement ({changed} of task {name} changed); name another "
                    "--output, or replace the file with --overwrite"
                )
            with noting_missing(store, f"task {name}", remedy):
                _measure(name, manager, subject, store, encoding, args)
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
        text=PROTOCOL.replace(TRUNCATED_PARTS[0], args.truncate),
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
        local_data=args.datasets is not None,
        **{name: getattr(args, name) for name in ("num_fewshot", "limit", "seed", "truncate", "metadata")},
    )
    return encoding, protocol


def _is_logged(entry: TaskScores, store: Store[HarnessResult]) -> bool:
    return store.path is not None and bool(entry.logged) and all(file.intact(store.path) for file in entry.logged)


def _changed(earlier: TaskScores, manager: Any, folder: Path | None) -> str | None:
    """Return which part of a task or group has changed since its scores were measured, or None."""
    if earlier.config_sha256 != config_hash(manager, earlier.task):
        return "the configuration"
    if earlier.inputs_sha256 != inputs_hash(manager, earlier.task, folder):
        return "a code, data or task file"
    return None


def _measure(
    name: str, manager: Any, subject: Subject, store: Store[HarnessResult], encoding: PromptEncoding, args: Namespace
) -> None:
    from megatron_coca.evaluation.tasks.lm_eval.data import PromptTokenizer, TaskData
    from megatron_coca.evaluation.tasks.lm_eval.model import HarnessModel, evaluate_task

    given = store.result.protocol
    window = given.rolling_window or given.max_length
    assert window is not None, "rolling_window or max_length is set"
    model = HarnessModel(
        subject.model,
        encoding,
        InputLimits(given.max_length, window, given.truncate),
        given.tokens_per_batch,
        min(subject.vocab_size, encoding.tokenizer.vocab_size),  # the tokenizer cannot decode other ids
        given.dynamic_length,
    )
    chat = None
    if given.chat is not None:
        chat = {"system_instruction": given.chat.system, "fewshot_as_multiturn": given.chat.multiturn}
    counting = PromptTokenizer(encoding.encode, encoding.tokenizer.vocab_size)
    data = TaskData(counting, encoding.tokenizer.fingerprint, args.datasets)
    settings = (given.num_fewshot, given.limit, given.seed, chat, data, given.plain_tasks)
    try:
        with measured(subject.device) as meter:
            results = evaluate_task(model, manager, name, *settings)
        place = store.path if args.log_samples else None
        logged = {} if place is None else log_samples(place, results["samples"], model.cut, model.unfinished)
        # The requested task or group comes last, so that its entry implies that the entries of its subtasks are stored.
        names = [*sorted({*results["results"], *results["group_subtasks"]} - {name}), name]
        hashes = [(config_hash(manager, each), inputs_hash(manager, each, args.datasets)) for each in names]
        entries = [
            task_scores(each, results, *both, model.cut, logged, model.unfinished)
            for each, both in zip(names, hashes, strict=True)
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
        _warn(entry, subject.label, given)
    for entry in entries[:-1]:
        store.put(entry)
    store.put(entries[-1], Cost.of(f"task {name}", meter, model.tokens))


def _warn(entry: TaskScores, label: str, given: HarnessProtocol) -> None:
    """Warn of prompts that were cut, and of answers in chats that had not ended."""
    if entry.cut and entry.documents_sha256 is not None:
        logger.warning(
            "%s: task %s: prompts of %d of %d samples exceed --max-length %s and lost their %s; raise "
            "--max-length, or do not compare the score",
            *(label, entry.task, entry.cut, entry.samples, given.max_length, given.truncate),
        )
    if entry.unfinished and given.chat is not None and entry.documents_sha256 is not None:
        logger.warning(
            "%s: task %s: %d of %d answers had not ended at the task's max_gen_toks, so they may be wrong for that "
            "reason; raise it in the task's file, or let a model that thinks answer at once, as "
            "--chat-template-kwargs '{\"enable_thinking\": false}' does for Qwen 3",
            *(label, entry.task, entry.unfinished, entry.samples),
        )


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
