"""Put the parts of `megatron-coca stretch` together: open the model, measure the methods, and write the page."""

import hashlib
import logging
from argparse import Namespace
from collections.abc import Sequence
from typing import NamedTuple

from megatron_coca.checkpoints import open_checkpoint
from megatron_coca.data import Tokenizer
from megatron_coca.evaluation.options import SubjectOptions, Variant
from megatron_coca.evaluation.results import EvaluationError, check_writable
from megatron_coca.evaluation.stretch.choices import Method, chosen_methods, multiples_up_to
from megatron_coca.evaluation.stretch.decision import decide
from megatron_coca.evaluation.stretch.page import MARKDOWN, reason, write_page
from megatron_coca.evaluation.stretch.plans import Plan, read_plan
from megatron_coca.evaluation.stretch.records import RESULTS, MethodRecord, ResultFile, StretchSettings
from megatron_coca.evaluation.stretch.running import Runner
from megatron_coca.evaluation.subject import Evaluation, Subject, dtype_of
from megatron_coca.evaluation.tasks.margin.measure import PROTOCOL, default_scored, read_documents
from megatron_coca.evaluation.tasks.retrieval.prompts import PromptForm, Text
from megatron_coca.support.arguments import ignoring
from megatron_coca.support.errors import InputError
from megatron_coca.work.locks import exclusive_lock

logger = logging.getLogger(__name__)


class Done(NamedTuple):
    """The page's text, the chosen method's name, why it was chosen, and its overrides."""

    text: str
    chosen: str
    reason: str
    overrides: list[str]


def stretch(args: Namespace) -> Done:
    """Measure the methods and write the page. `args.plan` is a plan or None (`planned`). Raises InputError."""
    check_writable(args.output / MARKDOWN)
    lock = args.output / f".{RESULTS}.lock"
    busy = f"{args.output}: another process is measuring there; wait for it, or name another --output"
    with exclusive_lock(lock, EvaluationError, busy, temporary=True):
        return _measure(args)


def planned(args: Namespace) -> Namespace:
    """Return the options with the plan instead of its path, and with the plan's values. Raises EvaluationError."""
    if args.plan is None:
        return args
    plan = read_plan(args.plan)
    values = {"methods": plan.methods, "to": plan.to, "documents": plan.documents, "dtype": plan.dtype or args.dtype}
    return Namespace(**vars(args) | values | {"plan": plan})


def _measure(args: Namespace) -> Done:
    plan: Plan | None = args.plan
    ignored = tuple(ignoring(args))
    trained = open_checkpoint(args.model, verify=False, overrides=ignored).trained
    dtype = dtype_of(trained, args.dtype, args.device, [args.output / RESULTS])
    options = SubjectOptions(args.model, (Variant("plain", (), ignored),), args.device, dtype, None, args.overwrite)
    evaluation = Evaluation(options, "stretch")
    tokenizer, length = evaluation.needed_tokenizer(), trained.model.seq_length
    lengths = [round(multiple * length) for multiple in multiples_up_to(args.to)]
    methods = chosen_methods(args.methods, args.to, length)
    documents = read_documents(evaluation, args.data, lengths[-1] + 1, args.documents).arrays
    subjects, records = load_methods(evaluation, methods, ignored)
    form = prompt_form(tokenizer)
    header = subjects[0].header
    settings = StretchSettings(
        checkpoint=header.checkpoint,
        tokenizer=header.tokenizer,
        environment=header.environment,
        documents=hashlib.sha256(b"".join(tokens.astype("<i8").tobytes() for tokens in documents)).hexdigest(),
        count=len(documents),
        scored=default_scored(evaluation),
        start=tokenizer.usual_start,
        chat=form.chat is not None,
        to=args.to,
        seed=plan.seed if plan else 0,
        text=PROTOCOL,
    )
    file = ResultFile(args.output / RESULTS, settings, records, args.overwrite)
    cases = {round(multiple * length): count for multiple, count in plan.cases.items()} if plan else None
    Runner(subjects, documents, form, tokenizer, file, args.budget, cases).run(lengths)
    if not file.result.lengths():
        raise EvaluationError(
            f"--budget: nothing was measured; left out: {file.result.left_out[0]}; raise it, or free memory"
        )
    configs = {subject.label: subject.config for subject in subjects}
    result = file.result.limited_to(configs)
    text, decision = write_page(result, configs, args.output, plan), decide(result)
    overrides = next(method.overrides for method in methods if method.name == decision.chosen)
    return Done(text, decision.chosen, reason(decision), [*overrides, *ignored])


def prompt_form(tokenizer: Tokenizer) -> PromptForm:
    """Return the form of prompts: the model's chat template, or plain text if it has none that keeps the text."""
    if tokenizer.chat is not None:
        form = PromptForm(tokenizer, None, tokenizer.chat)
        try:
            form.framed(Text("The sky is blue.\nWhat is blue?"), "")
        except InputError as error:
            logger.warning("the facts are hidden in plain text, not in chats: %s", error)
        else:
            return form
    return PromptForm(tokenizer, tokenizer.usual_start)


def load_methods(
    evaluation: Evaluation, methods: Sequence[Method], ignored: Sequence[str]
) -> tuple[list[Subject], list[MethodRecord]]:
    """Return the models of the methods that the checkpoint supports, which share their weights, and all records."""
    subjects: list[Subject] = []
    records = []
    for method in methods:
        weights = subjects[0].model if subjects else None
        subject = evaluation.subject(Variant(method.name, (), (*method.overrides, *ignored)), weights)
        if isinstance(subject, Subject):
            subjects.append(subject)
            records.append(MethodRecord(name=method.name, overrides=subject.header.overrides))
        elif not subjects:
            raise EvaluationError(f"{evaluation.options.checkpoint}: {subject.reason}")
        else:
            records.append(MethodRecord(name=method.name, overrides={}, error=subject.reason))
    return subjects, records
