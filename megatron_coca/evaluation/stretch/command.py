"""Run `megatron-coca stretch`: open the model, measure the methods, and write the page."""

import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_coca.checkpoints import open_checkpoint
from megatron_coca.data import Tokenizer
from megatron_coca.evaluation.chat_settings import ChatRecord
from megatron_coca.evaluation.chats import chat_record
from megatron_coca.evaluation.options import SubjectOptions, Variant
from megatron_coca.evaluation.results import EvaluationError, Store, check_writable, recorded
from megatron_coca.evaluation.stretch.choices import PLAIN, Method, chosen_methods, multiples_up_to
from megatron_coca.evaluation.stretch.decision import decide
from megatron_coca.evaluation.stretch.page import MARKDOWN, reason, write_page
from megatron_coca.evaluation.stretch.plans import Plan
from megatron_coca.evaluation.stretch.records import RESULTS, read_results, result_file
from megatron_coca.evaluation.stretch.running import Runner
from megatron_coca.evaluation.stretch.trials import ALL, Trial, write_trials
from megatron_coca.evaluation.subject import Evaluation, Subject, dtype_of
from megatron_coca.evaluation.tasks.margin.measure import PROTOCOL, default_scored, read_documents
from megatron_coca.evaluation.tasks.margin.task import MarginProtocol, MarginResult
from megatron_coca.evaluation.tasks.retrieval.measure import prompt_form
from megatron_coca.evaluation.tasks.retrieval.prompts import PromptForm, Text
from megatron_coca.support.arguments import source_keys
from megatron_coca.support.errors import InputError
from megatron_coca.work.locks import exclusive_lock

logger = logging.getLogger(__name__)

EARLIER = "results.json"
"""Name of the one result file for all methods that earlier versions wrote."""


class Done(NamedTuple):
    """The page and the chosen method.

    Attributes:
        text: the text of stretch.md.
        chosen: the name of the chosen method.
        reason: why this method is chosen.
        checkpoint, overrides: the checkpoint and the config overrides that select the method.
    """

    text: str
    chosen: str
    reason: str
    checkpoint: str
    overrides: list[str]


def stretch(args: Namespace, like: MarginResult | None = None) -> Done:
    """Measure the methods and write the page. `args` is what `plans.planned` returns. Raises InputError.

    `like` is the result of the model before fine-tuning, or None. If it is given, the same tokens are scored as for
    that model, at all lengths at which that model was measured.
    """
    check_writable(args.output / MARKDOWN)
    lock = args.output / f".{RESULTS}.lock"
    busy = f"{args.output}: another process is measuring there; wait for it, or name another --output"
    with exclusive_lock(lock, EvaluationError, busy, temporary=True):
        if (args.output / EARLIER).exists() and not args.overwrite:
            raise EvaluationError(
                f"{args.output / EARLIER}: was written by an earlier version, whose results cannot be resumed; name "
                "another --output, or replace it with --overwrite"
            )
        return _measure(args, like)


def _measure(args: Namespace, like: MarginResult | None) -> Done:
    plan: Plan | None = args.plan
    ignored = tuple(source_keys(args))
    trained = open_checkpoint(args.model, verify=False, overrides=ignored).trained
    dtype = dtype_of(trained, args.dtype, args.device, [result_file(args.output, PLAIN)])
    plain = Variant(PLAIN, (), ignored)
    options = SubjectOptions(args.model, (plain,), args.device, dtype, args.output / RESULTS, args.overwrite)
    evaluation = Evaluation(options, "margin")
    tokenizer, length = evaluation.needed_tokenizer(), trained.model.seq_length
    original = length if like is None else like.checkpoint.seq_length
    scored = default_scored(evaluation) if like is None else like.protocol.scored
    lengths = lengths_up_to(args.to, original)
    if length >= scored:
        lengths = sorted({*lengths, length})
    else:
        logger.info("%d tokens, the training length, are fewer than the %d scored ones: not measured", length, scored)
    methods = chosen_methods(args.methods, args.to, length)
    documents = read_documents(evaluation, args.data, lengths[-1] + 1, args.documents)
    protocol = MarginProtocol(
        text=PROTOCOL,
        scored=scored,
        seed=plan.seed if plan else 0,
        start=tokenizer.usual_start,
        chat=chat_of(tokenizer, recorded(result_file(args.output, PLAIN), "protocol", "chat", "date")),
    )
    fields = {"protocol": protocol, "documents": documents.record()}
    subjects, stores = load_methods(evaluation, methods, ignored, fields)
    (args.output / EARLIER).unlink(missing_ok=True)
    form = prompt_form(tokenizer, protocol.start, protocol.chat)
    cases = {round(multiple * original): count for multiple, count in plan.cases.items()} if plan else None
    result = Runner(subjects, documents.arrays, form, stores, args.budget, cases).run(lengths)
    if not result.lengths():
        raise EvaluationError(
            f"--budget: too small for any measurement (first left out: {result.left_out[0]}); raise it, or free memory"
        )
    configs = {subject.label: subject.config for subject in subjects}
    declared = None if plan and plan.finetune else plan  # with fine-tuning, write_trials reports the contrasts
    text, decision = write_page(result, configs, args.output, declared), decide(result)
    overrides = next(method.overrides for method in methods if method.name == decision.chosen)
    return Done(text, decision.chosen, reason(decision), args.model, [*overrides, *ignored])


def compare_trials(args: Namespace, trials: Sequence[Trial]) -> Done:
    """Write the page that compares fine-tuned models with the methods without training. Raises EvaluationError."""
    ignored = tuple(source_keys(args))
    opened = open_checkpoint(args.model, verify=False, overrides=ignored)
    given = {each.name: each for each in chosen_methods(args.methods, args.to, opened.trained.model.seq_length)}
    before = read_results(args.output, list(given))
    configs = {name: opened.configure([*given[name].overrides, *ignored]) for name in before.supported}
    text, decision = write_trials(before, configs, trials, args.output / ALL, args.plan)
    trained = {trial.name: trial.folder for trial in trials}
    if decision.chosen in trained:
        return Done(text, decision.chosen, reason(decision), str(trained[decision.chosen]), [*ignored])
    overrides = [*given[decision.chosen].overrides, *ignored]
    return Done(text, decision.chosen, reason(decision), args.model, overrides)


def lengths_up_to(to: float, length: int) -> list[int]:
    """Return the measured lengths in tokens for a model that was trained at `length` tokens."""
    return [round(multiple * length) for multiple in multiples_up_to(to)]


def chat_of(tokenizer: Tokenizer, date: str | None = None) -> ChatRecord | None:
    """Return the settings of the model's chat template, or None if it has none or if the template changes the text.

    `date` is the date in the prompts of earlier results. A template that prints a date prints this one again.
    """
    if tokenizer.chat is None:
        return None
    given = Namespace(apply_chat_template=True, system_instruction=None, chat_template_kwargs=None)
    try:
        PromptForm(tokenizer, None, tokenizer.chat).framed(Text("The sky is blue.\nWhat is blue?"), "")
        chat = chat_record(given, tokenizer)
    except InputError as error:
        logger.warning("the facts are hidden in plain text, not in chats: %s", error)
        return None
    if chat is not None and chat.date is not None and date is not None:
        tokenizer.chat, chat = replace(tokenizer.chat, now=date), chat.model_copy(update={"date": date})
    return chat


def load_methods(
    evaluation: Evaluation, methods: Sequence[Method], ignored: Sequence[str], fields: Mapping[str, Any]
) -> tuple[list[Subject], dict[str, Store[MarginResult]]]:
    """Return the models of the supported methods, and the result files of all methods by method name.

    The models share their weights. `fields` are the values that all result files have in common.
    """
    subjects: list[Subject] = []
    stores = {}
    for method in methods:
        weights = subjects[0].model if subjects else None
        subject = evaluation.subject(Variant(method.name, (), (*method.overrides, *ignored)), weights)
        if isinstance(subject, Subject):
            subjects.append(subject)
        elif not subjects:
            raise EvaluationError(f"{evaluation.options.checkpoint}: {subject.reason}")
        stores[method.name] = evaluation.store(subject, MarginResult, **fields)
    return subjects, stores
