"""Command-line options of all tasks. Nothing here imports PyTorch, so that `--help` is fast."""

import json
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_coca import methods
from megatron_coca.cluster import add_engine_options, part_of
from megatron_coca.cluster.parts import PART_HELP
from megatron_coca.evaluation.multiples import is_multiple
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.support.arguments import add_ignore_option, expanded, ignoring, local_path

DTYPES = ("float32", "bfloat16", "float16")
"""Keys of `checkpoints.weights.DTYPES`."""
AUTO = "auto"
"""The value of `--dtype` that `subject.with_choices` replaces."""

KindOfWork = Literal["layer forward", "layer forward+backward", "model forward", "model forward+backward", "decode"]
KINDS_OF_WORK: tuple[KindOfWork, ...] = get_args(KindOfWork)
"""The kinds of work that `speed` times."""
METHODS = tuple(methods.TABLES["pos_emb"])
RULER_NAMES = ("multi_key", "multi_value", "multi_query", "variable_tracking")
TRAINED = "trained"
"""The value of recall's `--seed` that selects the seed of the model's training."""
DYNAMIC_LENGTH = "current"
DYNAMIC_LENGTHS = {
    "current": "the number of tokens so far, at each step",
    "prompt": "the prompt's length at every step",
    "total": "the length of prompt and new tokens together, at every step",
}
"""Descriptions of `model.DYNAMIC_LENGTHS`: the length that a length-dependent extension uses during generation."""

TruncatedPart = Literal["beginning", "middle"]
TRUNCATED_PARTS: tuple[TruncatedPart, ...] = get_args(TruncatedPart)
"""The part that a prompt loses if it exceeds the limit."""

MOST_TOKENS = 2**27
"""Largest number of input tokens or of new tokens. A mistyped number would otherwise run for days."""
MOST_JOBS = 1024
MAX_SLUG_BYTES = 120
"""File systems limit names to 255 bytes, and file names add a task and a suffix to the slug."""


@dataclass(frozen=True)
class Variant:
    """A checkpoint with config overrides (YAML overlays, then `key=value`), and its label in reports."""

    label: str
    files: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class SubjectOptions:
    """The checkpoint with its variants, the device and the result files, as returned by `subject_options`."""

    checkpoint: str
    variants: tuple[Variant, ...]
    device: str
    dtype: str
    output: Path | None
    overwrite: bool

    def output_of(self, task: str, label: str) -> Path | None:
        if self.output is None or self.output.suffix == ".json":
            return self.output
        return self.output / f"{task}_{slug(label)}.json"


def whole_number(text: str, least: int = 0, most: int = 2**63 - 1) -> int:
    """Parse a whole number; an argparse type, like the functions below."""
    if not text.strip().isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    if int(text) > most:
        raise ArgumentTypeError(f"{text:.40}: must be at most {most:,}")
    return int(text)


def positive_int(text: str) -> int:
    return whole_number(text, 1, 2**31 - 1)


def token_count(text: str) -> int:
    return whole_number(text, 1, MOST_TOKENS)


def job_count(text: str) -> int:
    return whole_number(text, 1, MOST_JOBS)


def seed_or_trained(text: str) -> int | str:
    return text if text == TRAINED else whole_number(text)


def int_list(text: str, least: int = 1) -> list[int]:
    return [whole_number(part, least, MOST_TOKENS) for part in text.split(",")]


def length(text: str) -> int | str:
    """Parse a number of tokens, or a multiple of the training length, such as 4L or 3L/4."""
    return text if is_multiple(text) else token_count(text)


def length_list(text: str) -> list[int | str]:
    return [length(part) for part in text.split(",")]


def shift_list(text: str) -> list[int]:
    return int_list(text, 0)


def percent_list(text: str) -> list[int]:
    percents = sorted(set(int_list(text, 0)))
    if percents[-1] > 100:
        raise ArgumentTypeError(f"{text!r} is not a list of whole percentages from 0 to 100")
    return percents


def task_names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))
    if not names:
        raise ArgumentTypeError(f"{text!r} names no task; give NAME,NAME,...")
    return names


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in known]:
            raise ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return names

    return parse


def label_and_path(text: str) -> tuple[str, str]:
    label, equals, path = text.rpartition("=")
    if not (label and equals and path):
        raise ArgumentTypeError(f"{text!r} is not LABEL=DIR")
    return label, expanded(path)


def slug(label: str) -> str:
    """Turn a label into a part of a file name, in lower case.

    Each run of characters other than letters, digits, `.` and `-` becomes one `_`. A long label is truncated and gets
    a hash.
    """
    kept = "".join(character if character.isalnum() or character in ".-" else " " for character in label.lower())
    name = "_".join(kept.split()) or "unnamed"
    if len(name.encode()) <= MAX_SLUG_BYTES:
        return name
    return name.encode()[: MAX_SLUG_BYTES - 9].decode(errors="ignore") + "_" + sha256(label.encode()).hexdigest()[:8]


def plot_text(label: str) -> str:
    """Escape a label for matplotlib, where `$` starts a formula and a leading `_` hides a line from the legend."""
    escaped = label.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def in_sentence(label: str) -> str:
    """Return a label for a sentence, in quotation marks if it contains a comma or a semicolon."""
    return f"“{label}”" if "," in label or ";" in label else label


def dynamic_length_text(name: str) -> str:
    return f"dynamic length {name}: in generation, a length-dependent extension uses {DYNAMIC_LENGTHS[name]}"


def json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ArgumentTypeError(f'{text!r} is not a JSON object, such as {{"max_seq_lengths": [4096, 8192]}}')
    return found


def add_device_options(parser: ArgumentParser, automatic: bool = False) -> None:
    """Declare the device and the dtype. `automatic`: whether the dtype may be `AUTO`."""
    add = parser.add_argument
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    choices: tuple[str, ...] = DTYPES
    text = "dtype of weights and computation"
    if automatic:
        choices += (AUTO,)
        text += "; auto: bfloat16 if a short measurement finds it faster here than float32"
    add("--dtype", default="float32", choices=choices, help=f"{text}; default: float32")


def add_subject_options(parser: ArgumentParser) -> None:
    """Declare the options that `subject_options` reads."""
    add = parser.add_argument
    checkpoint = "a run's save folder, one of its step folders, or a Hugging Face folder"
    add("--checkpoint", type=expanded, required=True, metavar="DIR", help=checkpoint)
    overrides = "config overrides for all variants, e.g. rope_scaling.rope_type=dynamic"
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="overrides", help=overrides)
    add_ignore_option(parser)
    variant = "a label, then YAML overlays and KEY=VALUE overrides; repeat the option for each variant"
    add("--variant", nargs="+", action="append", default=[], metavar=("LABEL", "CHANGE"), help=variant)
    add("--label", help="the model's name in reports; default: the checkpoint folder's name and the overrides")
    add_device_options(parser, automatic=True)
    output = "the result file NAME.json, or a folder for one result file per variant"
    add("--output", type=local_path, metavar="FILE|DIR", help=output)
    add("--overwrite", action="store_true", help="replace results of a different measurement; the same one is resumed")
    jobs = "number of processes that share the work, spread over all GPUs; does not change results; default: 1"
    add("--jobs", type=job_count, default=1, metavar="N", help=jobs)
    add("--part", type=part_of, metavar="I/N", help=f"measure only a part; {PART_HELP}")


def add_dynamic_length_option(parser: ArgumentParser) -> None:
    choices = "; ".join(f"{name}: {text}" for name, text in DYNAMIC_LENGTHS.items())
    text = f"length that a length-dependent extension uses in generation: {choices}; default: {DYNAMIC_LENGTH}"
    parser.add_argument("--dynamic-length", choices=DYNAMIC_LENGTHS, default=DYNAMIC_LENGTH, help=text)


def add_batch_option(parser: ArgumentParser, default: int) -> None:
    text = f"tokens per forward pass; lower uses less memory; default: {default}"
    parser.add_argument("--tokens-per-batch", type=positive_int, default=default, metavar="N", help=text)


def truth(text: str) -> bool:
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in known:
        raise ArgumentTypeError(f"{text!r} is neither true nor false")
    return known[text.lower()]


def add_chat_options(parser: ArgumentParser, examples: bool = False) -> None:
    """Declare the options that `chats.chat_record` reads, spelled with hyphens or with underscores as in the harness.

    `examples`: whether to add the option for few-shot examples.
    """
    add = parser.add_argument
    chat = "send every prompt as a user message, rendered by the tokenizer's chat template"
    add("--apply-chat-template", "--apply_chat_template", action="store_true", help=chat)
    system = "with --apply-chat-template: the system message, which precedes a task's own"
    add("--system-instruction", "--system_instruction", metavar="TEXT", help=system)
    if examples:
        turns = "with --apply-chat-template: whether examples are chat turns, or all in one message; default: true"
        known = {"nargs": "?", "const": True, "type": truth, "metavar": "BOOL"}
        add("--fewshot-as-multiturn", "--fewshot_as_multiturn", help=turns, **known)  # type: ignore[arg-type]


def add_start_option(parser: ArgumentParser, text: str) -> None:
    start = f"put this token before every {text}, such as '<bos>' for Gemma; default: none"
    parser.add_argument("--start-token", metavar="TOKEN", help=start)


def add_document_options(parser: ArgumentParser) -> None:
    """Declare the options that `documents.read_subject_documents` reads."""
    add = parser.add_argument
    data = "text files, JSONL files, folders of such files, or shard prefixes; default: the run's test data"
    add("--data", type=expanded, nargs="+", metavar="PATH", help=data)
    add("--num-documents", type=positive_int, metavar="N", help="use only the first N documents that are long enough")
    max_length = "use documents of at least N tokens, truncated to N; default: the largest window or length"
    add("--max-length", type=length, metavar="N", help=max_length)
    repeat = "use the first N tokens of each document, tiled to --max-length"
    add("--repeat", type=positive_int, metavar="N", help=repeat)
    add_start_option(parser, "document")


def add_perplexity_options(parser: ArgumentParser) -> None:
    add_subject_options(parser)
    add_document_options(parser)
    add = parser.add_argument
    text = "window sizes in tokens, or as multiples of the training length: 1L,2L,4L"
    add("--windows", required=True, type=length_list, metavar="W,W,...", help=text)
    add("--stride", required=True, type=length, metavar="S", help="number of tokens that each window scores")
    text = "restrict the softmax to token ids below N, such as the text tokens of a model that also learned facts"
    add("--vocabulary", type=positive_int, metavar="N", help=text)
    add_batch_option(parser, 8192)


def add_longppl_options(parser: ArgumentParser) -> None:
    add_subject_options(parser)
    add_document_options(parser)
    add = parser.add_argument
    add("--lengths", required=True, type=length_list, metavar="N,N,...", help="lengths of the documents, such as 2L,4L")
    evaluator = "checkpoint or Hugging Face folder that finds the key tokens; default: each variant finds its own"
    add("--evaluator", type=expanded, metavar="DIR", help=evaluator)
    add("--short", type=token_count, default=4096, metavar="K", help="tokens of the short context; default: 4096")
    stride = "number of tokens that share the beginning of a short context; default: 1024"
    add("--stride", type=token_count, default=1024, metavar="S", help=stride)
    alpha = "smallest gain of a key token's log-likelihood by the long context, in nats; default: 2"
    add("--alpha", type=float, default=2.0, metavar="NATS", help=alpha)
    beta = "smallest log-likelihood of a key token given the long context, in nats; default: -2"
    add("--beta", type=float, default=-2.0, metavar="NATS", help=beta)
    add_batch_option(parser, 8192)


def add_retrieval_options(
    parser: ArgumentParser, cases: int, max_new_tokens: int = 64, has_haystack: bool = True
) -> None:
    """Declare the options that passkey, needle and ruler share, with the defaults of one task."""
    add_subject_options(parser)
    add = parser.add_argument
    lengths = [512, 1024, 2048, 4096, 8192, 16384, 32768]  # as in the CoCA paper
    text = "prompt lengths in tokens, or as multiples of the training length: 1L,2L; default: 512,1024,..,32768"
    add("--lengths", type=length_list, default=lengths, metavar="N,N,...", help=text)
    add(
        "--cases",
        type=positive_int,
        default=cases,
        metavar="N",
        help=f"number of prompts per length (and per depth or task); default: {cases}",
    )
    text = f"maximum tokens of an answer; default: {max_new_tokens}"
    add("--max-new-tokens", type=token_count, default=max_new_tokens, metavar="N", help=text)
    add("--seed", type=int, default=0, metavar="N", help="seed of the cases; all models get the same cases; default: 0")
    add_batch_option(parser, 16384)
    stub = 'end the prompt with the beginning of the answer, such as "The pass key is"'
    add("--answer-stub", action="store_true", help=stub)
    add_start_option(parser, "prompt")
    add_chat_options(parser)
    add_dynamic_length_option(parser)
    if has_haystack:
        text = "filler: text files, JSONL files, folders, or builtin (the built-in corpus); default: passkey filler"
        add("--haystack", nargs="+", metavar="PATH", help=text)


def add_passkey_options(parser: ArgumentParser) -> None:
    add_retrieval_options(parser, cases=100, has_haystack=False)


def add_recall_options(parser: ArgumentParser) -> None:
    add_subject_options(parser)
    add = parser.add_argument
    add("--lengths", type=length_list, metavar="N,N,...", help="input lengths in tokens; default: 1L,2L,4L,8L,16L")
    shifts = "offsets added to all positions of an input of the training length; default: 0,16,64,192,960"
    add("--shifts", type=shift_list, default=[0, 16, 64, 192, 960], metavar="N,N,...", help=shifts)
    add("--cases", type=positive_int, default=512, metavar="N", help="number of questions per length; default: 512")
    text = "number of questions for which attention heads are scored; default: 128"
    add("--diagnosed", type=whole_number, default=128, metavar="N", help=text)
    text = "seed of the questions, or trained for the seed of the model's training; default: 0"
    add("--seed", type=seed_or_trained, default=0, metavar="N", help=text)
    add_batch_option(parser, 32768)


def add_needle_options(parser: ArgumentParser) -> None:
    add_retrieval_options(parser, cases=5)
    text = "depths of the needle: percent of the text before it; default: 0,10,..,100"
    parser.add_argument("--depths", type=percent_list, default=[*range(0, 101, 10)], metavar="P,P,...", help=text)


def add_ruler_options(parser: ArgumentParser) -> None:
    add_retrieval_options(parser, cases=25, max_new_tokens=96)
    text = f"tasks to run; choices: {', '.join(RULER_NAMES)}; default: all"
    parser.add_argument("--tasks", type=names_of(RULER_NAMES), default=[*RULER_NAMES], metavar="TASK,...", help=text)


def add_lm_eval_options(parser: ArgumentParser) -> None:
    add_subject_options(parser)
    add = parser.add_argument
    add("--tasks", required=True, type=task_names, metavar="NAME,NAME,...", help="lm-eval tasks, groups or tags")
    add(
        "--include-path",
        nargs="+",
        type=local_path,
        default=[],
        metavar="DIR",
        help="folders with additional task files (*.yaml)",
    )
    shots = "few-shot examples before each document; default: the task's own number"
    add("--num-fewshot", type=whole_number, metavar="N", help=shots)
    add("--limit", type=positive_int, metavar="N", help="only the first N documents of each task")
    metadata = 'values for the code of the tasks, as in lm_eval, such as {"max_seq_lengths": [4096, 8192]}'
    add("--metadata", type=json_object, default={}, metavar="JSON", help=metadata)
    folder = "folder with the data sets, as tools/fetch_benchmarks.py writes it; default: the Hugging Face hub"
    add("--datasets", type=local_path, metavar="DIR", help=folder)
    longest = (
        "maximum input tokens; longer prompts are truncated; default: no limit, but rolling windows have the training "
        "length"
    )
    add("--max-length", type=token_count, metavar="N", help=longest)
    sides = "which part of a prompt is cut off: its beginning, as in lm_eval, or its middle, as in LongBench"
    add("--truncate", choices=TRUNCATED_PARTS, default=TRUNCATED_PARTS[0], help=f"{sides}; default: beginning")
    start = "put this token before every text; '' for none; default: the tokens that the model's own library adds"
    add("--start-token", metavar="TOKEN", help=start)
    add_chat_options(parser, examples=True)
    plain = "with --apply-chat-template: tasks or groups with prompts that stay plain text"
    add("--plain-tasks", type=task_names, default=(), metavar="NAME,NAME,...", help=plain)
    logged = "write every sample with its prompts and answers to RESULT.samples/TASK.jsonl, in the harness's format"
    add("--log-samples", "--log_samples", action="store_true", help=logged)
    add_batch_option(parser, 16384)
    add_dynamic_length_option(parser)
    add("--seed", type=whole_number, default=1234, metavar="N", help="seed for choosing few-shot examples")


def add_suite_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("suite", type=local_path, metavar="SUITE.yml", help="file with checkpoints and tasks; see configs/evaluation/")
    output = "output folder for results/ and report/; rerunning resumes"
    add("--output", required=True, type=local_path, metavar="DIR", help=output)
    checkpoint = "path of a checkpoint of the suite, or of any if the suite accepts any; repeat the option for each"
    add("--checkpoint", type=label_and_path, action="append", default=[], metavar="LABEL=DIR", help=checkpoint)
    add("--only", nargs="+", metavar="TASK", help="run only these entries of the suite's tasks")
    add("--jobs", type=job_count, default=1, metavar="N", help="number of processes that share each task; default: 1")
    add("--part", type=part_of, metavar="I/N", help=f"measure only a part, and write no report; {PART_HELP}")
    add_device_options(parser)
    add_engine_options(parser)


def add_analyse_options(parser: ArgumentParser) -> None:
    add_subject_options(parser)
    add_document_options(parser)
    parser.set_defaults(num_documents=4)
    add = parser.add_argument
    lengths = "input lengths in tokens, or as multiples of the training length: 1L,4L"
    add("--lengths", required=True, type=length_list, metavar="N,N,...", help=lengths)
    pairs = "number of token pairs for the angles, over all documents; default: 1024"
    add("--pairs", type=positive_int, default=1024, metavar="N", help=pairs)
    queries = "number of positions per document for entropy and scores; default: 128"
    add("--queries", type=positive_int, default=128, metavar="N", help=queries)
    add("--seed", type=whole_number, default=1234, help="seed for drawing the token pairs")


def add_speed_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument(
        "--config", nargs="+", type=local_path, metavar="FILE", help="YAML files of a run, which set the model's shape"
    )
    checkpoint = "checkpoint that sets the model's shape; its weights are not read"
    shape.add_argument("--checkpoint", type=expanded, metavar="DIR", help=checkpoint)
    overrides = "config overrides for all methods"
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="overrides", help=overrides)
    add("--lengths", required=True, type=int_list, metavar="N,N,...", help="sequence lengths in tokens")
    add("--methods", type=names_of(METHODS), default=["rotary", "coca"], help=", ".join(METHODS))
    add_ignore_option(parser)
    variants = "an additional method: its name, then YAML overlays and KEY=VALUE; repeat the option for each"
    add("--variant", nargs="+", action="append", default=[], metavar=("LABEL", "CHANGE"), help=variants)
    add("--what", type=names_of(KINDS_OF_WORK), help="work to time: " + ", ".join(KINDS_OF_WORK) + "; default: all")
    add("--batch-size", type=positive_int, default=1, metavar="N", help="sequences per batch; default: 1")
    add("--rounds", type=positive_int, default=9, metavar="N", help="number of timed rounds; default: 9")
    add("--label", help="name of the model's shape in reports; default: name of the configuration or checkpoint")
    add_device_options(parser)
    add("--output", type=local_path, metavar="FILE.json", help="the result file")
    add("--overwrite", action="store_true", help="replace an existing file")


def add_report_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "results",
        nargs="+",
        type=local_path,
        metavar="RESULTS",
        help="result files of megatron-coca evaluate, or folders of such files",
    )
    add("--output", required=True, type=local_path, metavar="DIR", help="folder for report.html and all other files")
    add("--title", default="Evaluation", help="title of the report")
    add("--baseline", metavar="LABEL", help="mark perplexities that differ significantly from this label's")
    papers = "add all published numbers, or none; default: those with the lengths and the protocol of the results"
    add("--papers", action=BooleanOptionalAction, help=papers)


def subject_options(args: Namespace) -> SubjectOptions:
    """Read the options of `add_subject_options`.

    Raises EvaluationError for missing files, and for variants with the same label or result file.
    """
    variants = read_variants(args)
    if any(not variant.label.strip() for variant in variants):
        raise EvaluationError("--variant: empty name; give the variant a name, or set --label")
    labels = [slug(variant.label) for variant in variants]
    if duplicates := sorted({label for label in labels if labels.count(label) > 1}):
        raise EvaluationError(f"--variant {duplicates[0]}: duplicate name; give each variant its own")
    if len(variants) > 1 and args.output is not None and args.output.suffix == ".json":
        raise EvaluationError(f"--output {args.output}: is one file, but there are several variants; name a folder")
    return SubjectOptions(args.checkpoint, variants, args.device, args.dtype, args.output, args.overwrite)


def read_variants(args: Namespace) -> tuple[Variant, ...]:
    """Read `--variant`, `--label` and `--set`, which applies to every variant. Raises EvaluationError."""
    if not args.variant:
        label = args.label or " ".join([Path(args.checkpoint).resolve().name, *args.overrides])
        return (Variant(label, (), (*args.overrides, *ignoring(args))),)
    variants = []
    for label, *changes in args.variant:
        files = tuple(change for change in changes if "=" not in change)
        for file in files:
            if not file.endswith((".yml", ".yaml", ".json")):
                raise EvaluationError(f"--variant {label}: {file} is neither KEY=VALUE nor a YAML file; correct it")
            if not Path(file).is_file():
                raise EvaluationError(f"--variant {label}: no such file: {file}; correct its path")
        overrides = (*args.overrides, *ignoring(args), *(change for change in changes if "=" in change))
        variants.append(Variant(full_label(args.label, label), files, overrides))
    return tuple(variants)


def full_label(label: str | None, variant: str) -> str:
    return " ".join(filter(None, [label, variant]))


def resolve_device(name: str) -> str:
    """Return the device to use; `auto` prefers CUDA. Raises EvaluationError for a device that cannot be used."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise EvaluationError(f"device {name}: cannot be used here ({reason}); use auto or cpu") from error
    return name
