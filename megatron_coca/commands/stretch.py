"""Compare methods that extend a model beyond its training length, without or with training; see docs/stretch.md.

megatron-coca stretch MODEL measures perplexity and the retrieval of hidden facts at 1x, 2x, .. of the training length.
It writes stretch.html and stretch.md with a picture, tables, and the configuration of the best method, or of the
simplest one if the best is undecided. The same command resumes.
"""

import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_coca.commands import command_parser
from megatron_coca.evaluation.labels import slug
from megatron_coca.evaluation.options import AUTO, DTYPES, positive_int
from megatron_coca.evaluation.results import EvaluationError, check_writable
from megatron_coca.evaluation.stretch.choices import (
    CHOICES,
    CONTROL,
    DEFAULT,
    FINETUNED,
    LORA,
    MOST,
    MOST_LENGTH,
    trial_methods,
)
from megatron_coca.support.arguments import add_source_options, expanded, local_path
from megatron_coca.support.plain_text import plain

if TYPE_CHECKING:
    from megatron_coca.evaluation.stretch.command import Done

EPILOG = f"""\
methods: {", ".join(CHOICES)}
A number after a colon is the factor of an extension, such as yarn:2. The default factor is the value of --to.

examples:
    megatron-coca stretch runs/350M_roformer_coca --to 4x --budget 20m
    megatron-coca stretch hf://HuggingFaceTB/SmolLM2-135M-Instruct --data books.jsonl --methods yarn,rerope --chat
"""
UNITS = {"s": 1, "m": 60, "h": 3600}


def multiple(text: str) -> float:
    """Parse a multiple of the training length, such as 4x."""
    if not re.fullmatch(r"\d+(\.\d+)?x?", text) or not 1 <= float(text.removesuffix("x")) <= MOST:
        raise ArgumentTypeError(f"{text!r} is not a multiple from 1x to {MOST}x, such as 4x")
    return float(text.removesuffix("x"))


def seconds(text: str) -> float:
    """Parse a duration, such as 90s, 20m or 2h."""
    if not re.fullmatch(r"\d+(\.\d+)?[smh]", text):
        raise ArgumentTypeError(f"{text!r} is not a duration, such as 90s, 20m or 2h")
    return float(text[:-1]) * UNITS[text[-1]]


def names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def parser() -> ArgumentParser:
    described = command_parser("stretch", __doc__, EPILOG)
    add = described.add_argument
    model = "a Hugging Face folder, a GGUF file, a run's save folder, or hf://NAME"
    add("model", type=expanded, metavar="MODEL", help=model)
    add(
        "--to",
        type=multiple,
        default="4x",
        metavar="4x",
        help="the longest input, as a multiple of the training length; default: %(default)s",
    )
    chosen = f"methods to compare; default: {','.join(DEFAULT)}"
    add("--methods", type=names, default=DEFAULT, metavar="NAME,...", help=chosen)
    data = "text files, JSONL files, folders of such files, or shard prefixes; default: the model's test data"
    add("--data", type=expanded, nargs="+", metavar="PATH", help=data)
    documents = "maximum number of documents for perplexity; default: 4, or fewer if the data are short"
    add("--documents", type=positive_int, metavar="N", help=documents)
    budget = "time to measure; measurements that do not fit are left out and listed; default: %(default)s"
    add("--budget", type=seconds, default="20m", metavar="20m", help=budget)
    plan = "read methods, lengths, numbers of cases and contrasts from this file"
    add("--plan", type=local_path, metavar="FILE", help=plan)
    add("--output", type=local_path, metavar="DIR", help="folder of the page and the results; default: stretch/MODEL")
    add("--overwrite", action="store_true", help="replace results of a different measurement; the same one is resumed")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    dtype = "dtype of weights and computation; default: %(default)s, the faster one in a short measurement"
    add("--dtype", default=AUTO, choices=(*DTYPES, AUTO), help=dtype)
    add_source_options(described)
    after = described.add_argument_group("with the method of best.yml, after the page is written")
    after.add_argument("--export", type=local_path, metavar="DIR", help="write a Hugging Face folder with this method")
    after.add_argument("--chat", action="store_true", help="chat with the model; an empty line or Ctrl-D ends the chat")
    trial = described.add_argument_group("fine-tuning, before the method is chosen")
    steps = "train the model for N steps with each --finetune-method, and measure the trained models"
    trial.add_argument("--finetune", type=positive_int, metavar="N", help=steps)
    tried = f"methods to train: {', '.join(FINETUNED)}; {CONTROL}, the control, is always added; default: %(default)s"
    trial.add_argument("--finetune-method", type=names, default="pi", metavar="NAME,...", help=tried)
    length = f"length of a training sample in tokens; default: the training length, up to {MOST_LENGTH}"
    trial.add_argument("--finetune-length", type=positive_int, metavar="N", help=length)
    lora = f"train low-rank adapters and the norms only (lora: {LORA.format(also='norms')})"
    trial.add_argument("--lora", action="store_true", help=lora)
    texts = "texts to train on, of any kind that --data accepts; default: the texts of --data"
    trial.add_argument("--finetune-data", type=expanded, nargs="+", metavar="PATH", help=texts)
    keys = "config keys for all trials, such as optimizer.params.lr=1e-4"
    trial.add_argument("--finetune-set", nargs="+", default=(), metavar="key=value", help=keys)
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the page, and return 0. Raises InputError."""
    args = parser().parse_args(arguments)
    if args.output is None:
        args.output = Path("stretch") / slug(Path(args.model.removeprefix("hf://").rstrip("/")).name)
    if args.export is not None and args.export.exists():
        raise EvaluationError(f"--export {args.export}: exists already; name a new folder")

    if args.export is not None:
        check_writable(args.export)
    from megatron_coca.evaluation.stretch.plans import planned

    args, trials = planned(args), list[str]()
    if args.finetune is not None:
        from megatron_coca.evaluation.stretch.finetuning import check

        trials = trial_methods(args.finetune_method)
        # The methods to train are also measured without training, for comparison.
        args.methods = (*args.methods, *(name for name in trials if name in CHOICES))
        check(args, trials)
    from megatron_coca.evaluation.stretch.command import stretch

    done = stretch(args)
    print(plain(done.text))
    print(f"\nwrote {args.output / 'stretch.html'}, and stretch.md, its picture, best.yml and results/ beside it")
    if trials:
        status, done = _train(args, trials, done)
        if status:
            return status
    if args.export is not None or args.chat:
        print(f"{done.chosen} is used: {done.reason}")
    if args.export is not None:
        _export(done, args.export)
    if args.chat:
        _chat(done, args.device)
    return 0


def _train(args: Namespace, trials: Sequence[str], before: "Done") -> tuple[int, "Done"]:
    """Train a model with each method, measure it at the same lengths, and write the page on all models. Return the exit
    status of the first training that failed, or 0, and the choice among all models.
    """
    from megatron_coca.evaluation.stretch.command import compare_trials, stretch
    from megatron_coca.evaluation.stretch.finetuning import finetune, is_outdated, read_trial, trained_folder
    from megatron_coca.evaluation.stretch.records import read_plain
    from megatron_coca.evaluation.stretch.trials import ALL

    plain_result, found = read_plain(args.output), []
    for method in trials:
        if status := finetune(args, method):
            return status, before
        page = args.output / f"after_{method}"
        changed = {"model": str(trained_folder(args.output, method)), "output": page, "methods": ()}
        changed["plan"] = args.plan and args.plan.model_copy(update={"methods": [], "contrasts": []})
        changed["overwrite"] = args.overwrite or is_outdated(page, args.finetune)
        print(plain(stretch(Namespace(**vars(args) | changed), plain_result).text))
        print(f"\nwrote {page / 'stretch.html'} for the model after {args.finetune} steps")
        found.append(read_trial(args.output, method, page))
    done = compare_trials(args, found)
    print(plain(done.text))
    print(f"\nwrote {args.output / ALL / 'stretch.html'} for all models, and best.yml beside it")
    return 0, done


def _export(done: "Done", folder: Path) -> None:
    from megatron_coca.checkpoints.exporting import export

    made = export(done.checkpoint, folder, done.overrides)
    print(f"{made.folder}: a {made.model_type} model for transformers, compared with {made.compared}")


def _chat(done: "Done", device: str) -> None:
    """Answer each line of standard input. A model without a chat template continues the line."""
    from megatron_coca.evaluation.options import resolve_device
    from megatron_coca.text_generation import load_generator

    generator = load_generator(done.checkpoint, done.overrides, device=resolve_device(device))
    turns: list[dict[str, str]] = []
    while text := _line():
        if generator.tokenizer.chat is None:
            (answer,) = generator.complete([text], 256)
        else:
            turns.append({"role": "user", "content": text})
            (answer,) = generator.answer([turns], 256)
            turns.append({"role": "assistant", "content": answer.text})
        print(plain(answer.text), flush=True)


def _line() -> str:
    print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()
