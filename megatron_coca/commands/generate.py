"""Continue prompts with a checkpoint, on the terminal or into a JSONL file."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_coca.commands import command_parser
from megatron_coca.config import ConfigError, split_inputs
from megatron_coca.config.source import read_file
from megatron_coca.data.errors import DataError
from megatron_coca.evaluation.options import (
    add_batch_option,
    add_device_options,
    add_dynamic_length_option,
    positive_int,
    resolve_device,
    whole_number,
)
from megatron_coca.evaluation.results import EvaluationError, check_writable, write_atomically
from megatron_coca.remote_files import hub_hint, is_url

if TYPE_CHECKING:
    from megatron_coca.model import Sampling
    from megatron_coca.text_generation import TextGenerator

EPILOG = """\
Without --prompt and --file, standard input is one prompt; on a terminal each line is one, until Ctrl-D.

examples:
    megatron-coca generate --checkpoint runs/coca --prompt "The sea was calm" --temperature 0.8 --top-p 0.95
    megatron-coca generate --checkpoint runs/coca configs/extend/dynamic_ntk.yml rope_scaling.factor=8 < book.txt
    megatron-coca generate --checkpoint runs/coca --file prompts.jsonl --num-samples 4 --temperature 1 --output o.jsonl
"""
SHOWN = 60
"""Characters of a prompt in the heading of its continuation."""


def parser() -> ArgumentParser:
    described = command_parser("generate", __doc__, EPILOG)
    add = described.add_argument
    changes = "config overrides: YAML files such as those in configs/extend, and KEY=VALUE"
    add("changes", nargs="*", metavar="CHANGE", help=changes)
    checkpoint = "a run's save folder, one step of it, or a Hugging Face folder"
    add("--checkpoint", required=True, metavar="DIR", help=checkpoint)
    prompts = described.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    file = "a prompt per line; in NAME.jsonl an object per line with the key prompt or text"
    prompts.add_argument("--file", metavar="FILE", help=file)
    chat = "prompts are messages to a chat, rendered by the tokenizer's template; on a terminal it remembers them"
    add("--chat", action="store_true", help=chat)
    add("--system", metavar="TEXT", help="with --chat: the system message")
    start = "put this token before every prompt, such as '<bos>' for Gemma; a chat has that of its template"
    add("--start-token", metavar="TOKEN", help=start)
    add("--max-new-tokens", type=positive_int, default=64, metavar="N", help="default: 64")
    greedy = "divisor of the logits; default: 0, the likeliest token at every step"
    add("--temperature", type=float, default=0.0, metavar="T", help=greedy)
    add("--top-k", type=whole_number, default=0, metavar="K", help="draw from the K likeliest tokens only; 0: from all")
    top_p = "draw from the likeliest tokens whose probabilities sum to P; default: 1, from all"
    add("--top-p", type=float, default=1.0, metavar="P", help=top_p)
    penalty = "above 1, makes the tokens of prompt and continuation less likely; default: 1"
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help=penalty)
    seed = "of the draws; on a terminal, each further prompt has the next; default: 0"
    add("--seed", type=whole_number, default=0, metavar="N", help=seed)
    stop = "end a continuation before this text; may be repeated"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)
    add("--num-samples", type=positive_int, default=1, metavar="N", help="continuations of each prompt; default: 1")
    output = "write objects with prompt, text, finish (eod, stop or length) and the number of tokens"
    add("--output", type=Path, metavar="FILE.jsonl", help=output)
    add_batch_option(described, 16384)
    add_dynamic_length_option(described)
    add("--no-cache", action="store_true", help="run the complete sequence for every token, as GPT-NeoX's recompute")
    add_device_options(described)
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0. Raises InputError."""
    args = parser().parse_intermixed_args(arguments)
    refuse_missing(args)
    prompts = read_prompts(args)
    if args.output is not None:
        check_writable(args.output)
    return run(args, prompts)


def refuse_missing(args: Namespace) -> None:
    """Raise an error for files that are not there, before PyTorch is imported, which takes seconds."""
    problems: list[str] = []
    for file in split_inputs(args.changes)[0]:
        read_file(file, problems)
    if problems:
        raise ConfigError(*problems)
    if not is_url(args.checkpoint) and not Path(args.checkpoint).exists():
        hint = hub_hint(args.checkpoint)
        raise EvaluationError(f"--checkpoint: {args.checkpoint}: no such folder; give a run's save folder{hint}")


def read_prompts(args: Namespace) -> list[str] | None:
    """The prompts of the options or of standard input; None if a person types them. Raises DataError."""
    if args.prompt is not None:
        return args.prompt
    if args.file is None and sys.stdin.isatty():
        return None
    try:
        text = sys.stdin.read() if args.file is None else Path(args.file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{args.file or 'standard input'}: cannot be read ({error})") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise DataError(f"{args.file or 'standard input'}: has no prompt; give one with --prompt or --file")
    if args.file is None:
        return [text.removesuffix("\n")]
    if not args.file.endswith(".jsonl"):
        return [line for _, line in lines]
    return [_prompt_of(line, f"{args.file}:{number}") for number, line in lines]


def _prompt_of(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: not JSON ({error})") from error
    prompt = value.get("prompt", value.get("text")) if isinstance(value, dict) else None
    if not isinstance(prompt, str):
        raise DataError(f'{place}: expected an object with the text of a prompt, such as {{"prompt": "The sea"}}')
    return prompt


def run(args: Namespace, prompts: list[str] | None) -> int:
    """Load the checkpoint, continue `prompts` and show or write the texts. Raises EvaluationError and others."""
    from megatron_coca.attention.positions import PositionRangeError
    from megatron_coca.checkpoints.weights import DTYPES
    from megatron_coca.model import Sampling
    from megatron_coca.text_generation import load_generator

    if args.system is not None and not args.chat:
        raise EvaluationError("--system: only with --chat")
    if args.chat and args.start_token is not None:
        raise EvaluationError("--start-token: a chat has that of its template")
    if args.chat and (args.output is not None or args.num_samples > 1):
        raise EvaluationError("--chat: prints one answer to each message; leave out --output and --num-samples")
    try:
        sampling = Sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty, args.seed)
        if "" in args.stop:
            raise ValueError("--stop: an empty text would end every continuation at once; leave it out")
    except ValueError as error:
        raise EvaluationError(str(error)) from error
    files, overrides = split_inputs(args.changes)
    options = {"max_new_tokens": args.max_new_tokens, "stops": args.stop, "dynamic_length": args.dynamic_length}
    options["use_cache"] = not args.no_cache
    device = resolve_device(args.device)
    try:
        generator = load_generator(args.checkpoint, overrides, files, device, DTYPES[args.dtype], args.start_token)
        if not args.chat and args.start_token is None and (start := generator.tokenizer.start) is not None:
            usual = generator.tokenizer.piece(start)
            note = f"the model's own library puts {usual} before every prompt: --start-token '{usual}' does"
            print(f"megatron-coca generate: {note}", file=sys.stderr)
        if args.chat:
            chat(generator, prompts, args.system, sampling, options)
        elif prompts is None:
            for number, prompt in enumerate(typed()):
                own = replace(sampling, seed=sampling.seed + number)
                show(generator.stream(prompt, sampling=own, **options))
        elif args.output is None and len(prompts) * args.num_samples == 1:
            show(generator.stream(prompts[0], sampling=sampling, **options))
        else:
            asked = [prompt for prompt in prompts for _ in range(args.num_samples)]
            options |= {"tokens_per_batch": args.tokens_per_batch, "progress": True}
            done = generator.complete(asked, sampling=sampling, **options)
            records = [
                {"prompt": prompt, "text": row.text, "finish": row.finish, "tokens": len(row.tokens)}
                for prompt, row in zip(asked, done, strict=True)
            ]
            write(records, args.output)
    except (PositionRangeError, FloatingPointError) as error:
        raise EvaluationError(str(error)) from error
    return 0


def typed() -> Iterator[str]:
    """Yield the lines that a person types, until the end of input."""
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


def chat(
    generator: "TextGenerator",
    prompts: list[str] | None,
    system: str | None,
    sampling: "Sampling",
    options: dict[str, Any],
) -> None:
    """Answer messages: each of `prompts` as a chat of its own, or those that a person types as one chat."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    for number, prompt in enumerate(typed() if prompts is None else prompts):
        messages = [*(messages if prompts is None else opening), {"role": "user", "content": prompt}]
        own = replace(sampling, seed=sampling.seed + number) if prompts is None else sampling
        answer = show(generator.answer(messages, sampling=own, **options))
        messages.append({"role": "assistant", "content": answer})


def show(pieces: Iterator[str]) -> str:
    """Print a text as it is generated, and return it."""
    text = ""
    for piece in pieces:
        print(piece, end="", flush=True)
        text += piece
    print()
    return text


def write(records: Sequence[dict[str, Any]], output: Path | None) -> None:
    """Write one JSON object per line to `output`, or print the continuations below their prompts."""
    if output is not None:
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write_atomically(output, "".join(lines).encode())
        print(f"{output}: {len(records)} continuations")
        return
    for number, record in enumerate(records, start=1):
        heading = " ".join(record["prompt"].split())
        print(f"[{number}/{len(records)}] {heading if len(heading) <= SHOWN else heading[: SHOWN - 3] + '...'}")
        print(f"{record['text']}\n")
