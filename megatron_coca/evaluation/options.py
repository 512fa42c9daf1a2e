"""Command-line options that several tasks declare, and their values. Imports no PyTorch, so that `--help` is fast."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_coca.config import split_inputs
from megatron_coca.evaluation.labels import full_label, slug
from megatron_coca.evaluation.multiples import is_multiple
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.support.arguments import (
    add_chat_variables,
    add_conf_dir,
    add_source_options,
    expanded,
    local_path,
    source_keys,
)
from megatron_coca.work.parts import PART_HELP, part_of

DTYPES = ("float32", "bfloat16", "float16")
"""Keys of `checkpoints.weights.DTYPES`."""
AUTO = "auto"
"""The value of `--dtype` that `subject.with_choices` replaces."""

DynamicLength = Literal["current", "prompt", "total"]
"""The same type as in `model`, repeated here because `model` imports PyTorch."""
DYNAMIC_LENGTH = "current"
DYNAMIC_LENGTHS = {
    "current": "the number of tokens so far, at each step",
    "prompt": "the prompt's length at every step",
    "total": "the length of prompt and new tokens together, at every step",
}
"""Descriptions of `model.DYNAMIC_LENGTHS`: the length that a length-dependent extension uses during generation."""

Decoding = Literal["growing", "static", "auto"]
"""The same type as in `model`."""
DECODING = "growing"
DECODINGS = {
    "growing": "the cache grows with every token",
    "static": "all steps have the same shapes, and on a GPU the host launches each step as one CUDA graph; the command "
    "stops with an error if the model does not support this",
    "auto": "static on a GPU if the model supports it, otherwise growing",
}
"""Descriptions of `model.Decoding`: how tokens after the first one are decoded."""


MOST_TOKENS = 2**27
"""Largest number of input tokens or of new tokens. With a mistyped number, a command would otherwise run for days."""
MOST_JOBS = 1024


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
    """Parse a whole number. This function and the parsers below are argparse types."""
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
    """Return the label and path in LABEL=DIR. For DIR without a label, the label is the folder's name."""
    label, equals, path = text.rpartition("=")
    if not path or (equals and not label):
        raise ArgumentTypeError(f"{text!r} is neither DIR nor LABEL=DIR")
    path = expanded(path)
    return label or Path(path).resolve().name, path


def dynamic_length_text(name: str) -> str:
    return f"dynamic length {name}: in generation, a length-dependent extension uses {DYNAMIC_LENGTHS[name]}"


def add_device_options(parser: ArgumentParser, automatic: bool = False) -> None:
    """Declare the device and the dtype. `automatic`: whether the dtype may be `AUTO`."""
    add = parser.add_argument
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    choices: tuple[str, ...] = DTYPES
    text = "dtype of weights and computation"
    if automatic:
        choices += (AUTO,)
        text += "; auto: bfloat16 if a short measurement finds it faster here than float32"
    add("--dtype", default="float32", choices=choices, help=f"{text}; default: %(default)s")


def add_subject_options(parser: ArgumentParser) -> None:
    """Declare the options that `subject_options` reads."""
    add = parser.add_argument
    checkpoint = "a run's save folder, one of its step folders, or a Hugging Face folder"
    add("--checkpoint", type=expanded, required=True, metavar="DIR", help=checkpoint)
    overrides = "config overrides for all variants, e.g. rope_scaling.rope_type=dynamic"
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="overrides", help=overrides)
    add_source_options(parser)
    add_conf_dir(parser)
    variant = "a label, then YAML overlays and KEY=VALUE overrides; repeat the option for each variant"
    add("--variant", nargs="+", action="append", default=[], metavar=("LABEL", "CHANGE"), help=variant)
    add("--label", help="the model's name in reports; default: the checkpoint folder's name and the overrides")
    add_device_options(parser, automatic=True)
    output = "the result file NAME.json, or a folder for one result file per variant"
    add("--output", type=local_path, metavar="FILE|DIR", help=output)
    add("--overwrite", action="store_true", help="replace results of a different measurement; the same one is resumed")
    jobs = (
        "number of processes that share the work, spread over all GPUs; does not change results; default: %(default)s"
    )
    add("--jobs", type=job_count, default=1, metavar="N", help=jobs)
    add("--part", type=part_of, metavar="I/N", help=f"measure only a part; {PART_HELP}")


def add_dynamic_length_option(parser: ArgumentParser) -> None:
    choices = "; ".join(f"{name}: {text}" for name, text in DYNAMIC_LENGTHS.items())
    text = f"length that a length-dependent extension uses in generation: {choices}; default: %(default)s"
    parser.add_argument("--dynamic-length", choices=DYNAMIC_LENGTHS, default=DYNAMIC_LENGTH, help=text)


def add_decoding_option(parser: ArgumentParser) -> None:
    choices = "; ".join(f"{name}: {text}" for name, text in DECODINGS.items())
    text = f"how tokens are decoded: {choices}; the tokens are equal up to rounding; default: %(default)s"
    parser.add_argument("--decoding", choices=DECODINGS, default=DECODING, help=text)


def add_batch_option(parser: ArgumentParser, default: int) -> None:
    text = "tokens per forward pass; lower uses less memory; default: %(default)s"
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
    system = "with --apply-chat-template: the system message; a task's own system text follows it"
    add("--system-instruction", "--system_instruction", metavar="TEXT", help=system)
    add_chat_variables(add, "with --apply-chat-template: ")
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
    """Read the variants from `--variant`, `--conf_dir` and `--label`. Every variant has the overrides of `--set`.

    Raises EvaluationError.
    """
    if not args.variant:
        label = args.label or " ".join([Path(args.checkpoint).resolve().name, *args.overrides])
        return (Variant(label, (), (*args.overrides, *source_keys(args))),)
    variants = []
    for label, *changes in args.variant:
        files, keys = split_inputs(changes, args.conf_dir)
        for file in files:
            if not Path(file).is_file():
                raise EvaluationError(f"--variant {label}: no such file: {file}; correct its path, or write KEY=VALUE")
        overrides = (*args.overrides, *source_keys(args), *keys)
        variants.append(Variant(full_label(args.label, label), tuple(files), overrides))
    return tuple(variants)


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
