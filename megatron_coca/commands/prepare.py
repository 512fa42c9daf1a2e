"""Prepare a corpus for training: from its files on disk to tokenized shards, a manifest and data.yml.

    megatron-coca prepare --builtin
    megatron-coca prepare configs/data/recipes/pile_books_wiki_code.yml --root /corpora
    megatron-coca prepare --input books=books.jsonl.zst code=src.jsonl.gz --train-tokenizer 32000 --output data/mine

    megatron-coca prepare RECIPE.yml --part 3/16        # on one of 16 hosts; then, once, without --part
    megatron-coca prepare RECIPE.yml --engine ray --address auto

After a kill or an error, the same command resumes.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_coca.atomic_write import refuse_existing
from megatron_coca.commands import command_parser
from megatron_coca.data.builtin import VOCAB_SIZE, prepare_builtin
from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.engines import make_on_ray, make_part, open_blocks, plan
from megatron_coca.data.preparation.manifest import RUN_CONFIG, empty_splits, read_manifest
from megatron_coca.data.preparation.preparation_plan import (
    MAX_RECORD_MIB,
    SPLITS,
    CorpusSource,
    Execution,
    Rules,
    training_texts,
)
from megatron_coca.data.preparation.recipe import (
    MAX_VOCAB_SIZE,
    Recipe,
    TokenizerTraining,
    check_tokenizer_files,
    named_paths,
    read_recipe,
)
from megatron_coca.data.preparation.run import prepare
from megatron_coca.data.readers.source import SourceSpec
from megatron_coca.data.tokenizers import TOKENIZERS, load_tokenizer
from megatron_coca.data.tokenizers.chat import with_source
from megatron_coca.data.tokenizers.kinds import Tokenizer
from megatron_coca.data.tokenizers.training import TRAINERS
from megatron_coca.program import part_of
from megatron_coca.remote_files import is_url, local_folder

_TOKENIZER_FILES = ("tokenizer_type", "vocab_file", "merge_file")
_FRACTIONS = ("valid_fraction", "test_fraction")
_READING = ("messages", "documents", "max_record_mib")
_OF_INPUT = (*_TOKENIZER_FILES, "train_tokenizer", "text_field", "chat_template", *_READING, "duplicates", *_FRACTIONS)


def _between(lowest: int, highest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not lowest <= (value := int(text)) <= highest:
            raise argparse.ArgumentTypeError(f"{text:.20} does not lie in {lowest} to {highest}")
        return value

    return number


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def parser() -> argparse.ArgumentParser:
    parser = command_parser("prepare", __doc__)
    parser.add_argument("recipe", nargs="?", type=Path, help="a YAML file that describes the corpus (docs/data.md)")
    parser.add_argument("--builtin", action="store_true", help="the corpus inside this Python installation")
    parser.add_argument("--input", nargs="+", metavar="NAME=PATH", help="files or folders; a name may be repeated")
    parser.add_argument(
        "--output", help="output folder or its URL on a store (with --builtin: its parent, default data)"
    )
    cores = _cores()
    parser.add_argument(
        "--workers",
        type=_between(0, 1024),
        help=f"worker processes ({cores}, with --engine ray 0 in each task); 0 works in the main process",
    )
    parser.add_argument(
        "--save-seconds", type=float, default=10.0, help="seconds between saved positions, the most work lost by a kill"
    )
    parser.add_argument(
        "--part",
        type=part_of,
        metavar="I/N",
        help="tokenize one of N shares; then run it without this",
    )
    parser.add_argument("--engine", choices=["local", "ray"], default="local", help="where to tokenize (local)")
    parser.add_argument("--address", help="with --engine ray: of the cluster, such as auto; else one is started here")
    parser.add_argument("--dry-run", action="store_true", help="print what would be read and the expected time")
    parser.add_argument("--strict", action="store_true", help="stop at the first unusable record")
    parser.add_argument("--skip-damaged", action="store_true", help="keep the readable part of a damaged file")
    parser.add_argument("--root", help="with a recipe: replaces its root folder; may be a URL")
    plain = parser.add_argument_group("with --input; a recipe sets its own")
    plain.add_argument(
        "--tokenizer-type", choices=list(TOKENIZERS), help="type of the tokenizer in --vocab-file and --merge-file"
    )
    plain.add_argument("--vocab-file")
    plain.add_argument("--merge-file")
    plain.add_argument(
        "--train-tokenizer",
        type=_between(1, MAX_VOCAB_SIZE),
        metavar="VOCAB_SIZE",
        help="train a SentencePiece tokenizer on the input",
    )
    plain.add_argument("--text-field", help="field of a record that contains its text (text)")
    chats = "records are chats; which tokens count in the loss: of all answers, of the last one, or all"
    plain.add_argument("--messages", choices=["answers", "last", "all"], help=chats)
    plain.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja2 template, instead of the tokenizer's")
    plain.add_argument(
        "--documents", choices=["file", "line", "paragraph"], help="unit of a document in text files (file)"
    )
    plain.add_argument(
        "--max-record-mib", type=_between(1, MAX_RECORD_MIB), metavar="MIB", help="skip and report longer records (64)"
    )
    plain.add_argument("--duplicates", metavar="{exact,keep}", help="duplicates to remove (exact)")
    plain.add_argument(
        "--valid-fraction", type=float, help="held-out fraction of the documents, by a hash of their key (0.01)"
    )
    plain.add_argument("--test-fraction", type=float, help="as --valid-fraction, for testing (0.01)")
    return parser


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The options among ``names`` that were given."""
    return {name: value for name in names if (value := getattr(arguments, name)) not in (None, False)}


def _refuse(arguments: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    given = ", ".join(f"--{name.replace('_', '-')}" for name in _given(arguments, names))
    if given:
        raise DataError(f"{given}: {reason}")


def _recipe_from_options(arguments: argparse.Namespace) -> Recipe:
    """The recipe that ``--input`` and its options describe."""
    _refuse(arguments, ["root"], "goes with a recipe")
    if (arguments.tokenizer_type is None) == (arguments.train_tokenizer is None):
        raise DataError("--input needs either --tokenizer-type or --train-tokenizer.")
    check_tokenizer_files("--input", arguments.tokenizer_type, arguments.vocab_file, arguments.merge_file)
    fields = {"text": arguments.text_field} if arguments.text_field else {}
    reading, treatment = _given(arguments, _READING), _given(arguments, ["duplicates"])
    sources = [
        CorpusSource(SourceSpec(name, paths, fields=fields, **reading), **treatment)
        for name, paths in named_paths(arguments.input).items()
    ]
    files = {name: getattr(arguments, name) for name in _TOKENIZER_FILES}
    training = TokenizerTraining(vocab_size=arguments.train_tokenizer) if arguments.train_tokenizer else None
    rules = Rules(**_given(arguments, _FRACTIONS))
    return Recipe(sources, rules, None, files if training is None else None, training, arguments.chat_template)


def _recipe(arguments: argparse.Namespace) -> tuple[Recipe, str | Path]:
    """The recipe that the command line names or describes, and the output folder or its URL."""
    if arguments.input:
        recipe = _recipe_from_options(arguments)
    else:
        _refuse(arguments, _OF_INPUT, "is for --input only; set it in the recipe")
        recipe = read_recipe(arguments.recipe, arguments.root)
    if (output := arguments.output or recipe.output) is None:
        raise DataError("Give the output folder: --output, or `output` in the recipe.")
    return recipe, output


def _run(arguments: argparse.Namespace) -> str:
    """Do what the command line describes; return what to print."""
    if sum(map(bool, (arguments.builtin, arguments.input, arguments.recipe))) != 1:
        raise DataError("Give one of: a recipe, --input, --builtin. See --help.")
    if arguments.builtin:
        others = (*_OF_INPUT, "root", "strict", "skip_damaged", "part", "address", "dry_run")
        _refuse(arguments, [name for name in others if name != "train_tokenizer"], "does not go with --builtin")
        return _summary(prepare_builtin(Path(arguments.output or "data"), arguments.train_tokenizer or VOCAB_SIZE))
    recipe, named = _recipe(arguments)
    url = str(named).rstrip("/") if is_url(named) else None
    output = Path(named) if url is None else local_folder(url, "prepared", DataError)
    on_ray = arguments.engine == "ray"
    if not on_ray:
        _refuse(arguments, ["address"], "goes with --engine ray")
    elif arguments.part:
        raise DataError("--part: goes with --engine local; Ray divides the work itself")
    rules = replace(recipe.rules, strict=arguments.strict, skip_damaged=arguments.skip_damaged)
    workers = arguments.workers if arguments.workers is not None else 0 if on_ray else _cores()
    execution = Execution(workers, arguments.save_seconds)
    training, tokenizer = recipe.training, recipe.tokenizer

    def train(folder: Path) -> Tokenizer:
        assert training is not None, "a recipe has a tokenizer or its training"
        texts = training_texts(recipe.sources, recipe.rules, training.characters)
        return TRAINERS[training.tokenizer_type][training.model](texts, training.vocab_size, folder / "tokenizer")

    source = train if tokenizer is None else load_tokenizer(**tokenizer)
    if recipe.chat_template is not None:
        if callable(source):
            raise DataError("chat_template: not available with train_tokenizer; train it first, then name its files")
        source.chat = with_source(source.chat, recipe.chat_template)
    notes = None if training is None else {"train_tokenizer": training.model_dump()}
    if arguments.dry_run:
        return plan(recipe.sources, source, rules, execution.workers)
    if arguments.part or on_ray:
        refuse_existing(output, DataError)
        blocks = open_blocks(recipe.sources, output, source, rules, notes)
        if arguments.part:
            part, parts = arguments.part
            return make_part(blocks, part, parts, execution)
        make_on_ray(blocks, arguments.address, execution)
    return _summary(prepare(recipe.sources, output, source, rules, execution, notes, url))


def _summary(path: Path) -> str:
    record = read_manifest(path)
    lines = [f"{path}"]
    for entry in record["sources"]:
        lines += [f"  {entry['name']} {split}: {_sizes(entry[split])}" for split in SPLITS]
    for source in record["inputs"]:
        name = source["name"]
        lines += [f"  {name} left out: {count:,} x {reason}" for reason, count in source["left_out"].items()]
        lines += [f"  {name} files not read: {count:,} x {reason}" for reason, count in source["unread"].items()]
        lines += [f"  {name} FAULTY: {count:,} x {kind}" for kind, count in source["problems"].items()]
        lines += [f"    {line}" for line in source["problems_named"][:10]]
        lines += [f"  {name}: NO DOCUMENT of the set {missing!r}" for missing in source["sets_missing"]]
    config = path.parent / RUN_CONFIG
    if config.exists():
        splits = {split for split in SPLITS for entry in record["sources"] if entry[split]["documents"]}
        if "train" in splits:
            lines += empty_splits(record["sources"])
            lines.append(f"Train with: megatron-coca train configs/350M/roformer_coca.yml {config}")
        else:
            lines.append(f"Only {', '.join(sorted(splits))} documents: a run needs training documents.")
    return "\n".join(lines)


def _sizes(facts: dict[str, Any]) -> str:
    if not facts["documents"]:
        return "no document"
    per_token = facts["bytes"] / facts["tokens"]
    return f"{facts['documents']:,} documents, {facts['tokens']:,} tokens, {per_token:.2f} bytes per token"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0. Raises DataError."""
    print(_run(parser().parse_args(arguments)))
    return 0
