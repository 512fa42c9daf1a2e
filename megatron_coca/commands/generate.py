"""Continue prompts with a checkpoint. The continuations go to the terminal or into a JSONL file."""

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_coca.commands import command_parser
from megatron_coca.config import ConfigError, split_inputs
from megatron_coca.config.source import given_layer, read_file
from megatron_coca.data.errors import DataError
from megatron_coca.evaluation.options import (
    add_batch_option,
    add_device_options,
    resolve_device,
    token_count,
    whole_number,
)
from megatron_coca.evaluation.results import EvaluationError, check_writable, out_of_memory, write_atomically
from megatron_coca.support.arguments import add_ignore_option, expanded, ignoring, local_path
from megatron_coca.support.plain_text import plain
from megatron_coca.support.remote_files import hub_hint, is_url

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from megatron_coca.model import Sampling
    from megatron_coca.text_generation import TextGenerator

EPILOG = """\
Without --prompt and --file, the command asks for prompts on a terminal. Otherwise, the whole standard input is one
prompt. Configuration files may contain GPT-NeoX's generation keys, such as text-gen-type and maximum_tokens.

examples:
    megatron-coca generate --checkpoint runs/coca --prompt "The sea was calm" --temperature 0.8 --top-p 0.95
    megatron-coca generate --checkpoint runs/chat --chat
    megatron-coca generate --checkpoint runs/coca configs/extend/dynamic_ntk.yml rope_scaling.factor=8 < book.txt
    megatron-coca generate --checkpoint runs/coca --file prompts.jsonl --num-samples 4 --temperature 1 --output o.jsonl
"""
MODES = ("interactive", "unconditional", "input-file")
"""Values of GPT-NeoX's key `text_gen_type`: typed prompts, empty prompts, and the lines of `sample_input_file`."""
SHOWN = 60
"""Maximum number of prompt characters in the heading of a continuation."""


def sample_count(text: str) -> int:
    return whole_number(text, 1, 1_000_000)


UPSTREAM: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "maximum_tokens": ("max_new_tokens", lambda value: token_count(str(value))),
    "temperature": ("temperature", float),
    "top_k": ("top_k", lambda value: whole_number(str(value))),
    "top_p": ("top_p", float),
    "num_samples": ("num_samples", lambda value: sample_count(str(value))),
    "sample_output_file": ("output", lambda value: local_path(str(value))),
}
"""GPT-NeoX's generation keys: the option with the same meaning, and a function that converts the value."""


def parser() -> ArgumentParser:
    described = command_parser("generate", __doc__, EPILOG)
    add = described.add_argument
    changes = "overrides for the configuration: YAML files, such as those in configs/extend, and KEY=VALUE pairs"
    add("changes", nargs="*", metavar="CHANGE", help=changes)
    checkpoint = "a run's save folder, one of its step folders, or a Hugging Face folder"
    add("--checkpoint", type=expanded, required=True, metavar="DIR", help=checkpoint)
    prompts = described.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be repeated")
    file = "file with one prompt per line; each line of a .jsonl file is an object with the key prompt or text"
    prompts.add_argument("--file", type=expanded, metavar="FILE", help=file)
    chat = (
        "make each prompt the user message of a separate chat, rendered with the tokenizer's template; typed messages "
        "form one conversation"
    )
    add("--chat", action="store_true", help=chat)
    add("--system", metavar="TEXT", help="with --chat: the system message")
    start = "put this token before every prompt, such as '<bos>' for Gemma; chat templates add their own start token"
    add("--start-token", metavar="TOKEN", help=start)
    add(
        "--max-new-tokens",
        type=token_count,
        default=64,
        metavar="N",
        help="maximum length of a continuation in tokens; default: 64",
    )
    greedy = "divisor of the logits; default: 0, which selects the most likely token at every step"
    add("--temperature", type=float, default=0.0, metavar="T", help=greedy)
    add(
        "--top-k",
        type=whole_number,
        default=0,
        metavar="K",
        help="sample only from the K most likely tokens; default: 0, all tokens",
    )
    top_p = "sample only from the most likely tokens with a total probability of P; default: 1, all tokens"
    add("--top-p", type=float, default=1.0, metavar="P", help=top_p)
    penalty = "values above 1 make tokens less likely if the prompt or continuation contains them; default: 1"
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help=penalty)
    add("--seed", type=whole_number, default=0, metavar="N", help="sampling seed; default: 0")
    stop = "end a continuation before this text; may be repeated"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)
    add(
        "--num-samples",
        type=sample_count,
        default=1,
        metavar="N",
        help="number of continuations of each prompt; default: 1",
    )
    output = "write one object per line: prompt, text, finish (eod, stop or length) and tokens (the token count)"
    add("--output", type=local_path, metavar="FILE.jsonl", help=output)
    add_ignore_option(described)
    add_batch_option(described, 16384)
    add_device_options(described)
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate the continuations and return 0. Raises InputError."""
    described = parser()
    args = described.parse_intermixed_args(arguments)
    check_files(args)
    if defaults := upstream_defaults(args):
        described.set_defaults(**defaults)
        args = described.parse_intermixed_args(arguments)
    given = args.prompt is not None or args.file is not None
    typed = not given and args.output is None and sys.stdin.isatty() and sys.stdout.isatty()
    if typed and args.num_samples > 1:
        raise EvaluationError("--num-samples: not supported with typed prompts; give the prompt with --prompt")
    prompts = None if typed else read_prompts(args)
    if args.output is not None:
        check_writable(args.output)
    return run(args, prompts)


def upstream_defaults(args: Namespace) -> dict[str, Any]:
    """Return the defaults of options that GPT-NeoX's generation keys in the configuration set. Raises InputError."""
    files, overrides = split_inputs(args.changes)
    given = given_layer(overrides, files).values
    defaults: dict[str, Any] = {}
    for key, (option, kind) in UPSTREAM.items():
        if (value := given.get(key)) is not None:
            try:
                defaults[option] = kind(value)
            except (ValueError, TypeError, ArgumentTypeError) as error:
                raise ConfigError(f"{key}: not a valid value ({error}); correct it or leave it out") from error
    if defaults.get("top_p") == 0:  # disables the filter in GPT-NeoX
        del defaults["top_p"]
    mode = given.get("text_gen_type")
    if mode not in (None, *MODES):
        raise ConfigError(f"text_gen_type: `{mode}` is not supported; use one of {' | '.join(MODES)}")
    if mode == "interactive":  # GPT-NeoX then writes no file and only one continuation
        return {option: value for option, value in defaults.items() if option not in ("output", "num_samples")}
    if args.prompt is not None or args.file is not None or mode is None:
        return defaults
    if mode == "unconditional":
        return defaults | {"prompt": [""]}
    if (file := given.get("sample_input_file")) is None:
        raise ConfigError("sample_input_file: not set; text_gen_type: input-file needs it")
    return defaults | {"file": expanded(str(file))}


def check_files(args: Namespace) -> None:
    """Raise an error for missing files. This check runs before the import of PyTorch, which takes seconds."""
    problems: list[str] = []
    for file in split_inputs(args.changes)[0]:
        read_file(file, problems)
    if problems:
        raise ConfigError(*problems)
    if not is_url(args.checkpoint) and not Path(args.checkpoint).exists():
        hint = hub_hint(args.checkpoint)
        raise EvaluationError(f"--checkpoint: {args.checkpoint}: no such folder; give a run's save folder{hint}")


def read_prompts(args: Namespace) -> list[str]:
    """Return the prompts of the options or of standard input. Raises DataError."""
    if args.prompt is not None:
        return args.prompt
    place = "standard input" if args.file is None else args.file
    if args.file is None and sys.stdin.isatty():
        print("Type one prompt of any number of lines. Ctrl-D at the start of a line ends it.", file=sys.stderr)
    try:
        text = sys.stdin.read() if args.file is None else Path(args.file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{place}: cannot be read ({reason}); name a file of UTF-8 text") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise DataError(f"{place}: no prompt; give one with --prompt or --file")
    if args.file is None:
        return [text.removesuffix("\n")]
    if not args.file.endswith(".jsonl"):
        return [line for _, line in lines]
    return [_prompt_of(line, f"{args.file}:{number}") for number, line in lines]


def _prompt_of(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: not JSON ({error}); correct this line") from error
    prompt = value.get("prompt", value.get("text")) if isinstance(value, dict) else None
    if not isinstance(prompt, str):
        raise DataError(f'{place}: no prompt text; write an object such as {{"prompt": "The sea"}}')
    return prompt


def sampling_of(args: Namespace) -> "Sampling":
    """Return how tokens are chosen. Raises EvaluationError for options that are invalid or exclude each other."""
    from megatron_coca.model import Sampling

    if args.system is not None and not args.chat:
        raise EvaluationError("--system: has no effect without --chat; add --chat")
    if args.chat and args.start_token is not None:
        raise EvaluationError(
            "--start-token: not supported with --chat, because chat templates add their own; leave it out"
        )
    if "" in args.stop:
        raise EvaluationError("--stop: an empty text would end every continuation at once; leave it out")
    try:
        return Sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty, args.seed)
    except ValueError as error:
        raise EvaluationError(str(error)) from error


def run(args: Namespace, prompts: list[str] | None) -> int:
    """Load the checkpoint, continue `prompts`, and print or write the continuations. Raises InputError.

    If `prompts` is None, they are typed at the terminal.
    """
    from megatron_coca.attention.positions import PositionRangeError
    from megatron_coca.checkpoints.weights import DTYPES
    from megatron_coca.commands.typed_prompts import answer_typed
    from megatron_coca.text_generation import load_generator

    sampling = sampling_of(args)
    files, overrides = split_inputs([*args.changes, *ignoring(args)])
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "stops": args.stop}
    device = resolve_device(args.device)
    try:
        generator = load_generator(args.checkpoint, overrides, files, device, DTYPES[args.dtype], args.start_token)
        if not args.chat and args.start_token is None and (warning := generator.tokenizer.start_warning()) is not None:
            print(plain(f"megatron-coca generate: {warning}"), file=sys.stderr)
        if prompts is None:
            answer_typed(generator, args, sampling, options)
            return 0
        records = continue_all(generator, args, prompts, sampling, options)
    except (PositionRangeError, FloatingPointError) as error:
        raise EvaluationError(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        remedy = "lower --max-new-tokens or --tokens-per-batch, or use --dtype bfloat16"
        raise EvaluationError(f"{device}: out of memory; {remedy}") from error
    write(records, args.output)
    return 0


def continue_all(
    generator: "TextGenerator", args: Namespace, prompts: list[str], sampling: "Sampling", options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the records of `--output`, `--num-samples` for each prompt."""
    asked = [prompt for prompt in prompts for _ in range(args.num_samples)]
    options = options | {"tokens_per_batch": args.tokens_per_batch, "progress": len(asked) > 1}
    if args.chat:
        opening = [] if args.system is None else [{"role": "system", "content": args.system}]
        chats = [[*opening, {"role": "user", "content": text}] for text in asked]
        done = generator.answer(chats, sampling=sampling, **options)
    else:
        done = generator.complete(asked, sampling=sampling, **options)
    return [
        {"prompt": prompt, "text": row.text, "finish": row.finish, "tokens": len(row.tokens)}
        for prompt, row in zip(asked, done, strict=True)
    ]


def write(records: Sequence[dict[str, Any]], output: Path | None) -> None:
    """Write one JSON object per line to `output`, or print the continuations, with headings if there are several."""
    if output is not None:
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write_atomically(output, "".join(lines).encode())
        print(f"{output}: {len(records)} continuations")
        return
    show = plain if sys.stdout.isatty() else str  # a file or another program gets the unchanged text
    if len(records) == 1:
        print(show(records[0]["text"]))
        return
    for number, record in enumerate(records, start=1):
        heading = " ".join(record["prompt"].split())
        heading = heading if len(heading) <= SHOWN else heading[: SHOWN - 3] + "..."
        print(show(f"[{number}/{len(records)}] {heading}\n{record['text']}\n"))
