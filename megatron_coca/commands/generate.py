"""Continue prompts with a checkpoint. The continuations go to the terminal or into a JSONL file."""

import hashlib
import json
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_coca.commands import command_parser
from megatron_coca.commands.prompts.continuations import printed, written_to
from megatron_coca.config import ConfigError, split_inputs
from megatron_coca.config.source import Layer, named_checkpoint, readable_layer
from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers.chat import with_variables
from megatron_coca.evaluation.options import (
    add_batch_option,
    add_decoding_option,
    add_device_options,
    resolve_device,
    token_count,
    whole_number,
)
from megatron_coca.evaluation.results import EvaluationError, check_writable, out_of_memory
from megatron_coca.support.arguments import (
    add_chat_variables,
    add_configurations,
    add_source_options,
    expanded,
    local_path,
    source_keys,
)
from megatron_coca.support.plain_text import plain
from megatron_coca.support.remote_files import hub_hint, is_url

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from megatron_coca.model import Sampling
    from megatron_coca.text_generation import Continuation, TextGenerator

EPILOG = """\
Without --prompt and --file, the command asks for prompts if it runs on a terminal. If not, the whole standard input is
one prompt. Configuration files may contain GPT-NeoX's generation keys, such as text-gen-type and maximum_tokens.

`megatron-coca generate --chat` is a conversation with a model that has a chat template.

examples:
    megatron-coca generate --checkpoint runs/coca --prompt "The sea was calm" --temperature 0.8 --top-p 0.95
    megatron-coca generate --checkpoint runs/chat --chat
    megatron-coca generate --checkpoint runs/coca configs/extend/dynamic_ntk.yml rope_scaling.factor=8 < book.txt
    megatron-coca generate --checkpoint runs/coca --file prompts.jsonl --num-samples 4 --temperature 1 --output o.jsonl
"""
MODES = ("interactive", "unconditional", "input-file")
"""Values of GPT-NeoX's key `text_gen_type`: typed prompts, empty prompts, and the lines of `sample_input_file`."""
MOST_PROBLEMS = 20
"""Maximum number of prompts in an error message."""
LESS_MEMORY = "lower --max-new-tokens or --tokens-per-batch, or use --dtype bfloat16"


def sample_count(text: str) -> int:
    return whole_number(text, 1, 1_000_000)


ESCAPES = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}
"""Escapes in `--stop`. The command replaces them, because a shell does not."""


def stop_text(text: str) -> str:
    """Return a stop string that a user typed in a shell, with its escapes replaced by the characters they mean."""
    return re.sub(r"\\[nt\\]", lambda found: ESCAPES[found[0]], text)


UPSTREAM: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "maximum_tokens": ("max_new_tokens", lambda value: token_count(str(value))),
    "temperature": ("temperature", float),
    "top_k": ("top_k", lambda value: whole_number(str(value))),
    "top_p": ("top_p", float),
    "num_samples": ("num_samples", lambda value: sample_count(str(value))),
    "sample_output_file": ("output", lambda value: local_path(str(value))),
}
"""GPT-NeoX's generation keys, each with the option of the same meaning and a function that converts the value."""


def parser() -> ArgumentParser:
    described = command_parser("generate", __doc__, EPILOG)
    add = described.add_argument
    changes = "overrides for the configuration: YAML files, such as those in configs/extend, and KEY=VALUE pairs"
    add_configurations(described, changes, "changes", "*")
    checkpoint = (
        "a run's save folder, one of its step folders, or a Hugging Face folder; default: the keys load and iteration "
        "of the configuration"
    )
    add("--checkpoint", type=expanded, metavar="DIR", help=checkpoint)
    _add_prompt_options(described)
    _add_sampling_options(described)
    _add_output_options(described)
    add_source_options(described)
    add_batch_option(described, 16384)
    add_decoding_option(described)
    add_device_options(described)
    return described


def _add_prompt_options(described: ArgumentParser) -> None:
    add = described.add_argument
    prompts = described.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be repeated")
    file = "file with one prompt per line; each line of a .jsonl file is an object with the key prompt or text"
    prompts.add_argument("-i", "--file", "--sample_input_file", type=expanded, metavar="FILE", help=file)
    chat = (
        "make each prompt the user message of a separate chat, rendered with the tokenizer's template; typed messages "
        "form one conversation"
    )
    add("--chat", action="store_true", help=chat)
    add("--system", metavar="TEXT", help="with --chat: the system message")
    add_chat_variables(add, "with --chat: ")
    start = "put this token before every prompt, such as '<bos>' for Gemma; chat templates add their own start token"
    add("--start-token", metavar="TOKEN", help=start)


def _add_sampling_options(described: ArgumentParser) -> None:
    add = described.add_argument
    add(
        "--max-new-tokens",
        type=token_count,
        default=64,
        metavar="N",
        help="maximum length of a continuation in tokens; default: %(default)s",
    )
    greedy = "divisor of the logits; default: %(default)g, which selects the most likely token at every step"
    add("--temperature", type=float, default=0.0, metavar="T", help=greedy)
    add(
        "--top-k",
        type=whole_number,
        default=0,
        metavar="K",
        help="sample only from the K most likely tokens; default: %(default)s, all tokens",
    )
    top_p = "sample only from the most likely tokens with a total probability of P; default: %(default)g, all tokens"
    add("--top-p", type=float, default=1.0, metavar="P", help=top_p)
    penalty = "values above 1 make tokens less likely if the prompt or continuation contains them; default: %(default)g"
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help=penalty)
    add("--seed", type=whole_number, default=0, metavar="N", help="sampling seed; default: %(default)s")
    stop = (
        r"end a continuation before this text, which may be the name of a special token; \n is a line feed, \t a tab "
        r"and \\ a backslash; may be repeated"
    )
    add("--stop", type=stop_text, action="append", default=[], metavar="TEXT", help=stop)
    add(
        "--num-samples",
        type=sample_count,
        default=1,
        metavar="N",
        help="number of continuations of each prompt; default: %(default)s",
    )


def _add_output_options(described: ArgumentParser) -> None:
    add = described.add_argument
    output = (
        "write each complete continuation as a line with a JSON object: prompt, text, finish (eod, stop or length) "
        "and tokens (the token count); the same command resumes"
    )
    add("-o", "--output", "--sample_output_file", type=local_path, metavar="FILE.jsonl", help=output)
    replacing = "replace the file --output if it was written with other options or prompts; otherwise it is resumed"
    add("--overwrite", action="store_true", help=replacing)


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate the continuations and return 0. Raises InputError."""
    described = parser()
    args = described.parse_intermixed_args(arguments)
    files, overrides = split_inputs(args.changes, args.conf_dir)
    layer = readable_layer(overrides, files)
    checkpoint = args.checkpoint or named_checkpoint(layer.values)
    described.set_defaults(checkpoint=checkpoint, **upstream_defaults(args, layer))
    args = described.parse_intermixed_args(arguments)
    check_checkpoint(args)
    given = args.prompt is not None or args.file is not None
    typed = not given and args.output is None and sys.stdin.isatty() and sys.stdout.isatty()
    if typed and args.num_samples > 1:
        raise EvaluationError("--num-samples: not supported with typed prompts; give the prompt with --prompt")
    prompts = None if typed else read_prompts(args)
    if args.output is not None:
        check_writable(args.output)
    return run(args, prompts)


def upstream_defaults(args: Namespace, layer: Layer) -> dict[str, Any]:
    """Return the options that GPT-NeoX's generation keys in the configuration set, as defaults. Raises InputError."""
    given = layer.values
    defaults: dict[str, Any] = {}
    for key, (option, kind) in UPSTREAM.items():
        if (value := given.get(key)) is not None:
            try:
                defaults[option] = kind(value)
            except (ValueError, TypeError, ArgumentTypeError) as error:
                place = layer.where[key]
                raise ConfigError(f"{place}: {key}: not a valid value ({error}); correct it or leave it out") from error
    if defaults.get("top_p") == 0:  # in GPT-NeoX, 0 disables the filter
        del defaults["top_p"]
    mode = given.get("text_gen_type")
    if mode not in (None, *MODES):
        place, modes = layer.where["text_gen_type"], " | ".join(MODES)
        raise ConfigError(f"{place}: text_gen_type: `{mode}` is not supported; use one of {modes}")
    if mode == "interactive":  # GPT-NeoX then writes no file and only one continuation
        return {option: value for option, value in defaults.items() if option not in ("output", "num_samples")}
    if args.prompt is not None or args.file is not None or mode is None:
        return defaults
    if mode == "unconditional":
        return defaults | {"prompt": [""]}
    if (file := given.get("sample_input_file")) is None:
        raise ConfigError("sample_input_file: not set; text_gen_type: input-file needs it")
    return defaults | {"file": expanded(str(file))}


def check_checkpoint(args: Namespace) -> None:
    """Raise an error for a missing folder. This check runs before the import of PyTorch, which takes seconds."""
    if args.checkpoint is None:
        raise EvaluationError("--checkpoint: not set; give a run's save folder, or a configuration with the key load")
    if not is_url(args.checkpoint) and not Path(args.checkpoint).exists():
        hint = hub_hint(args.checkpoint, bare=True)
        raise EvaluationError(f"--checkpoint: {args.checkpoint}: no such folder; give a run's save folder{hint}")


def read_prompts(args: Namespace) -> dict[str, str]:
    """Return the prompts from the options or from standard input, each by its place. Raises DataError."""
    if args.prompt is not None:
        return {f"--prompt {number}": text for number, text in enumerate(args.prompt, start=1)}
    place = "standard input" if args.file is None else args.file
    if args.file is None and sys.stdin.isatty():
        print("Type one prompt of any number of lines. Ctrl-D at the start of a line ends it.", file=sys.stderr)
    try:
        text = sys.stdin.read() if args.file is None else Path(args.file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{place}: cannot be read ({reason}); name a file of UTF-8 text") from error
    lines = {f"{place}:{number}": line for number, line in enumerate(text.split("\n"), start=1) if line.strip()}
    if not lines:
        raise DataError(f"{place}: no prompt; give one with --prompt or --file")
    if args.file is None:
        return {place: text.removesuffix("\n")}
    if not args.file.endswith(".jsonl"):
        return lines
    return {where: _prompt_of(line, where) for where, line in lines.items()}


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
    if args.chat_template_kwargs and not args.chat:
        raise EvaluationError("--chat-template-kwargs: has no effect without --chat; add --chat")
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


def run(args: Namespace, prompts: Mapping[str, str] | None) -> int:
    """Load the checkpoint, continue the prompts, and print or write the continuations.

    `prompts` has the prompts by their places. If it is None, the user types them at the terminal. Raises InputError.
    """
    from megatron_coca.attention.positions import PositionRangeError
    from megatron_coca.checkpoints.weights import DTYPES
    from megatron_coca.commands.prompts.typed_prompts import answer_typed
    from megatron_coca.model import DecodingError
    from megatron_coca.text_generation import load_generator

    sampling = sampling_of(args)
    files, overrides = split_inputs([*args.changes, *source_keys(args)], args.conf_dir)
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "stops": args.stop, "decoding": args.decoding}
    device = resolve_device(args.device)
    try:
        dtype = DTYPES[args.dtype]
        generator = load_generator(args.checkpoint, overrides, files, device, dtype, args.start_token, show=True)
        if args.chat and generator.tokenizer.chat is not None:
            generator.tokenizer.chat = with_variables(generator.tokenizer.chat, args.chat_template_kwargs)
        if not args.chat and args.start_token is None and (warning := generator.tokenizer.start_warning()) is not None:
            print(plain(f"megatron-coca generate: {warning}"), file=sys.stderr)
        if prompts is None:
            answer_typed(generator, args, sampling, options)
        else:
            continue_all(generator, args, prompts, sampling, options)
    except (PositionRangeError, DecodingError, FloatingPointError) as error:
        raise EvaluationError(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise EvaluationError(f"{device}: out of memory; {LESS_MEMORY}") from error
    return 0


def continue_all(
    generator: "TextGenerator",
    args: Namespace,
    prompts: Mapping[str, str],
    sampling: "Sampling",
    options: Mapping[str, Any],
) -> None:
    """Continue every prompt `--num-samples` times. Each continuation is printed or written when it is complete."""
    opening = [] if args.system is None else [{"role": "system", "content": args.system}]
    check_prompts(generator, args, prompts, opening)
    asked = [prompt for prompt in prompts.values() for _ in range(args.num_samples)]
    if args.output is None:
        opened = printed(asked)
    else:
        opened = written_to(args.output, asked, settings_of(generator, args, sampling), args.overwrite)
    with opened as continuations:

        def ended(place: int, row: "Continuation") -> None:
            record = {"prompt": asked[place], "text": row.text, "finish": row.finish, "tokens": len(row.tokens)}
            continuations.add(place, record)

        own = {"tokens_per_batch": args.tokens_per_batch, "progress": len(asked) > 1, "ended": ended}
        own |= {**options, "left_out": frozenset(continuations.finished)}
        if args.chat:
            chats = [[*opening, {"role": "user", "content": text}] for text in asked]
            generator.answer(chats, sampling=sampling, **own)
        else:
            generator.complete(asked, sampling=sampling, **own)


def check_prompts(
    generator: "TextGenerator", args: Namespace, prompts: Mapping[str, str], opening: Sequence[Mapping[str, str]]
) -> None:
    """Raise DataError if prompts cannot be encoded or are too long for the model. The error lists these prompts.

    `opening` contains the messages before each prompt in a chat.
    """
    from megatron_coca.attention.positions import PositionRangeError

    problems: list[str] = []
    for place, text in prompts.items():
        try:
            ids = generator.encode_chat([*opening, {"role": "user", "content": text}]) if args.chat else None
            tokens = len(generator.encode(text) if ids is None else ids)
            generator.check_room(tokens, args.max_new_tokens)
        except PositionRangeError as error:
            sizes, reason = f"{tokens} tokens and {args.max_new_tokens} new ones", str(error).partition(";")[0]
            problems.append(f"{place}: {sizes} are too many ({reason}); shorten the prompt, or lower --max-new-tokens")
        except DataError as error:
            problems.append(f"{place}: {error}")
    if problems:
        more = [f"and {len(problems) - MOST_PROBLEMS} more prompts"] if len(problems) > MOST_PROBLEMS else []
        raise DataError("\n".join([*problems[:MOST_PROBLEMS], *more]))


def settings_of(generator: "TextGenerator", args: Namespace, sampling: "Sampling") -> str:
    """Return the digest of all that a continuation depends on besides its prompt, as 16 hexadecimal digits."""
    names = ("chat", "system", "start_token", "max_new_tokens", "stop", "dtype")
    settings: dict[str, Any] = {name: getattr(args, name) for name in names} | asdict(sampling)
    settings |= {"model": generator.identify(), "tokenizer": generator.tokenizer.fingerprint}
    if args.chat and generator.tokenizer.chat is not None:
        settings["template"] = asdict(replace(generator.tokenizer.chat, now=None))
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
