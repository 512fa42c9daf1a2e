"""Prepare a corpus for training: turn its files into tokenized shards, a manifest and data.yml.

    megatron-coca prepare --builtin
    megatron-coca prepare configs/data/recipes/pile_books_wiki_code.yml --root /corpora
    megatron-coca prepare --input books=books.jsonl.zst code=src.jsonl.gz --train-tokenizer 32000 --output data/mine

    megatron-coca prepare RECIPE.yml --engine slurm --tasks 400 --cpus 4
    megatron-coca prepare RECIPE.yml --part 3/16        # host 3 of 16; run every part twice, then once without --part

If the command is killed or fails, the same command resumes.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_coca.commands import command_parser
from megatron_coca.data.builtin import VOCAB_SIZE, ensure_builtin
from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.blocks import TokenizerSource
from megatron_coca.data.preparation.few_documents import with_splits
from megatron_coca.data.preparation.manifest import RUN_CONFIG, empty_splits, read_manifest
from megatron_coca.data.preparation.preparation_plan import (
    SPLITS,
    CorpusSource,
    Execution,
    find_inputs,
    shard_name,
    training_texts,
)
from megatron_coca.data.preparation.recipe import MAX_VOCAB_SIZE, Recipe, read_recipe, resolve_recipe
from megatron_coca.data.preparation.run import completed, count_tasks, prepare, prepare_part
from megatron_coca.data.readers import READERS
from megatron_coca.data.readers.folders import REPOSITORIES, holds_repository
from megatron_coca.data.tokenizers import TOKENIZERS, load_tokenizer, train_sentencepiece
from megatron_coca.data.tokenizers.chat import shipped_templates, with_source, with_variables
from megatron_coca.data.tokenizers.kinds import Tokenizer
from megatron_coca.data.tokenizers.losses import Sample
from megatron_coca.support.arguments import add_chat_variables, expanded, local_path
from megatron_coca.support.plain_text import plain
from megatron_coca.support.remote_files import is_url
from megatron_coca.work.engines import run
from megatron_coca.work.parts import PART_HELP, part_of
from megatron_coca.work.settings import EngineSettings, add_engine_options, engine_of, without_engine
from megatron_coca.work.tasks import CommandTask

MOST_WORKERS = 1024
MOST_TASKS = 1000
"""Maximum number of tasks on an engine by default. Slurm's default limit for an array is 1001."""

MODELS = (
    (1_000_000_000, "configs/350M/roformer_coca.yml"),
    (0, "configs/quickstart/roformer_coca.yml"),
)
"""Configurations that the summary suggests, each with the smallest number of training tokens for which it does so."""
BY_LINE = "if every line of a text file is a document, use --documents line (`documents: line` in a recipe)"

_TOKENIZER_KEYS = ("tokenizer_type", "vocab_file", "merge_file", "start_token", "end_token", "accept_tokenizer")
_RECIPE_KEYS = (
    *_TOKENIZER_KEYS,
    "chat_template",
    "chat_template_kwargs",
    "chat_time",
    "valid_fraction",
    "test_fraction",
    "shard_gib",
)
_SOURCE_KEYS = ("reader", "messages", "documents", "max_record_mib", "max_faulty", "duplicates")
_OF_INPUT = (*_RECIPE_KEYS, "train_tokenizer", "text_field", *_SOURCE_KEYS)


def parser() -> argparse.ArgumentParser:
    parser = command_parser("prepare", __doc__)
    parser.add_argument(
        "recipe", nargs="?", type=local_path, help="a YAML file that describes the corpus (docs/data.md)"
    )
    parser.add_argument(
        "--builtin", action="store_true", help="prepare the built-in corpus from this Python installation"
    )
    parser.add_argument(
        "--input", nargs="+", metavar="NAME=PATH", help="files or folders of each source; a name may be repeated"
    )
    parser.add_argument(
        "--output", type=expanded, help="output folder; with --builtin, the folder above it (default: data)"
    )
    cores = _cores()
    parser.add_argument(
        "--workers",
        type=int,
        help=f"number of worker processes (default: {cores}, with --engine that of --cpus); 0 uses the main process",
    )
    parser.add_argument(
        "--part",
        type=part_of,
        metavar="I/N",
        help=f"tokenize every N-th block, or write shards if all blocks exist; {PART_HELP}",
    )
    parser.add_argument("--strict", action="store_true", help="stop at the first unusable record")
    parser.add_argument("--root", type=expanded, help="with a recipe: folder or URL that replaces the recipe's root")
    plain = parser.add_argument_group("options for --input (defaults in parentheses); a recipe sets its own values")
    _add_tokenizer_options(plain.add_argument)
    _add_record_options(plain.add_argument)
    _add_split_options(plain.add_argument)
    add_engine_options(parser)
    return parser


def _add_tokenizer_options(add: Callable[..., object]) -> None:
    add("--tokenizer-type", choices=list(TOKENIZERS), help="type of the tokenizer in --vocab-file and --merge-file")
    add("--vocab-file", type=expanded, help="vocabulary or model file of the tokenizer")
    add("--merge-file", type=expanded, help="merges file of the tokenizer, if there is one")
    add("--train-tokenizer", type=int, metavar="VOCAB_SIZE", help="train a SentencePiece tokenizer on the input")
    start = "put this token before every text, such as '<s>' for Llama; default: none"
    add("--start-token", metavar="TOKEN", help=start)
    end = "token at the end of each document; default: from tokenizer_config.json, else from a list (docs/data.md)"
    add("--end-token", metavar="TOKEN", help=end)
    accept = "continue even if a decoded sample shows that the tokenizer loses text"
    add("--accept-tokenizer", action="store_true", help=accept)


def _add_record_options(add: Callable[..., object]) -> None:
    add("--reader", choices=list(READERS), help="reader of the input; docs/data.md describes them (files)")
    add("--text-field", help="record field that contains the text (text)")
    chats = "read the records as chats; compute the loss on all answers, on the last answer, or on all tokens"
    add("--messages", choices=["answers", "last", "all"], help=chats)
    names = ", ".join(shipped_templates())
    template = f"Jinja2 chat template that replaces the tokenizer's template: a file, or one of {names}"
    add("--chat-template", type=expanded, metavar="FILE", help=template)
    add_chat_variables(add)
    time = "the time that chat templates may print, such as 2026-01-31T12:00; default: the start of the preparation"
    add("--chat-time", metavar="TIME", help=time)
    add(
        "--documents", choices=["file", "line"], help="treat each text file, or each of its lines, as a document (file)"
    )
    add("--max-record-mib", type=int, metavar="MIB", help="skip and report records above this size (64)")
    faulty = "continue if at most this share of the records is faulty (0.1)"
    add("--max-faulty", type=float, metavar="SHARE", help=faulty)


def _add_split_options(add: Callable[..., object]) -> None:
    add("--duplicates", choices=["exact", "keep"], help="remove exact duplicates, or keep them (exact)")
    add(
        "--valid-fraction",
        type=float,
        help="fraction of documents to hold out for validation, selected by a hash of the document's key (0.01)",
    )
    add("--test-fraction", type=float, help="fraction of documents to hold out for testing (0.01)")
    shards = "write shards from about this many GiB of files each (one shard for each source, set and split)"
    add("--shard-gib", type=float, metavar="GIB", help=shards)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return the options in ``names`` that were set on the command line. 0 counts as set; None and False do not."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def _exclude(arguments: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Raise an error if any of these options is set."""
    given = ", ".join(f"--{name.replace('_', '-')}" for name in _given(arguments, names))
    if given:
        raise DataError(f"{given}: {reason}")


def _recipe_from_options(arguments: argparse.Namespace) -> Recipe:
    """Return the recipe that ``--input`` and its options describe."""
    _exclude(arguments, ["root"], "has no effect without a recipe; leave it out")
    source = _given(arguments, _SOURCE_KEYS)
    if arguments.text_field is not None:
        source["fields"] = {"text": arguments.text_field}
    sources: dict[str, dict[str, Any]] = {}
    for item in arguments.input:
        name, separator, path = item.partition("=")
        if not (name and separator and path):
            raise DataError(f"--input {item}: not NAME=PATH; write, for example, books=books.jsonl.zst")
        sources.setdefault(name, {"paths": [], **source})["paths"].append(path)
    recipe = {"sources": sources, **_given(arguments, _RECIPE_KEYS)}
    if arguments.train_tokenizer is not None:
        recipe["train_tokenizer"] = {"vocab_size": arguments.train_tokenizer}
    return resolve_recipe(recipe, "--input")


def _recipe(arguments: argparse.Namespace) -> tuple[Recipe, Path]:
    """Return the recipe that the command line names or describes, and the output folder."""
    if arguments.input:
        recipe = _recipe_from_options(arguments)
    else:
        _exclude(arguments, _OF_INPUT, "only supported with --input; set it in the recipe")
        recipe = read_recipe(arguments.recipe, arguments.root)
    output = recipe.output if arguments.output is None else arguments.output
    if not output:
        raise DataError("output: not set; give --output, or set `output` in the recipe")
    if is_url(output):
        raise DataError(f"{output}: the output must be a local folder; upload it when it is complete")
    return recipe, Path(output)


def _run(arguments: argparse.Namespace) -> str:
    """Run the preparation that the command line describes, and return the text to print."""
    if sum(map(bool, (arguments.builtin, arguments.input, arguments.recipe))) != 1:
        raise DataError("input: give exactly one of a recipe, --input and --builtin; see --help")
    workers = _cores() if arguments.workers is None else arguments.workers
    if not 0 <= workers <= MOST_WORKERS:
        raise DataError(f"--workers {workers}: must be from 0 to {MOST_WORKERS}")
    if arguments.builtin:
        others = (*_OF_INPUT, "root", "strict", "part")
        excluded = [name for name in others if name != "train_tokenizer"]
        _exclude(arguments, excluded, "not supported with --builtin; leave it out")
        pieces = VOCAB_SIZE if arguments.train_tokenizer is None else arguments.train_tokenizer
        if not 0 < pieces <= MAX_VOCAB_SIZE:
            raise DataError(f"--train-tokenizer {pieces}: must be from 1 to {MAX_VOCAB_SIZE:,}")
        return _summary(ensure_builtin(Path("data" if arguments.output is None else arguments.output), pieces))
    recipe, output = _recipe(arguments)
    rules, execution = replace(recipe.rules, strict=arguments.strict), Execution(workers)
    source, notes = _tokenizer_source(recipe), _notes(recipe)
    if arguments.part:
        part, parts = arguments.part
        return prepare_part(recipe.sources, output, source, part, parts, rules, execution, notes)
    return _summary(prepare(recipe.sources, output, source, rules, execution, notes), recipe.sources)


def _notes(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of the tokenizer's training, which determine the result."""
    if recipe.training is None:
        return {}
    start = {} if recipe.start_token is None else {"start_token": recipe.start_token}
    return {"train_tokenizer": recipe.training.model_dump()} | start


def _tokenizer_source(recipe: Recipe) -> TokenizerSource:
    """Return the tokenizer of a recipe with its chat template and start token, or a function that trains one."""
    training = recipe.training
    if training is not None:
        if recipe.chat_template is not None or recipe.chat_time is not None or recipe.chat_variables:
            raise DataError(
                "chat_template: not supported with train_tokenizer; train the tokenizer first, then name its files"
            )

        def train(folder: Path) -> Tokenizer:
            sources = with_splits(recipe.sources, find_inputs(recipe.sources), recipe.rules)
            texts = training_texts(sources, recipe.rules, training.characters)
            trained = train_sentencepiece(texts, training.vocab_size, folder / "tokenizer")
            return _beginning(trained, recipe.start_token)

        return train
    assert recipe.tokenizer is not None, "a recipe has a tokenizer or its training"
    tokenizer = load_tokenizer(**recipe.tokenizer)
    if recipe.chat_template is not None:
        tokenizer.chat = with_source(tokenizer.chat, recipe.chat_template)
    if recipe.chat_variables:
        if tokenizer.chat is None:
            raise DataError("chat_template_kwargs: the tokenizer has no chat template; set chat_template, too")
        tokenizer.chat = with_variables(tokenizer.chat, recipe.chat_variables)
    if recipe.chat_time is not None:
        if tokenizer.chat is None:
            raise DataError("chat_time: has no effect, because the tokenizer has no chat template; leave it out")
        tokenizer.chat = replace(tokenizer.chat, now=recipe.chat_time)
    return _beginning(tokenizer, recipe.start_token)


def _beginning(tokenizer: Tokenizer, symbol: str | None) -> Tokenizer:
    if symbol is not None:
        tokenizer.begin_texts(symbol)
    return tokenizer


def _summary(path: Path, sources: Sequence[CorpusSource] = ()) -> str:
    record = read_manifest(path)
    lines = [f"{path}"]
    for (source, part), entries in groupby(record["sources"], key=lambda entry: (entry["source"], entry["part"])):
        lines += [f"  {shard_name(source, part, '')} {split}: {line}" for split, line in _sizes(list(entries))]
    for source in record["inputs"]:
        name = source["name"]
        lines += [f"  {name} left out: {count:,} x {reason}" for reason, count in source["left_out"].items()]
        if (sample := Sample.restored(source.get("sample", {}))).passages:
            lines.append(f"  {name} tokenizer: {sample}")
        lines += [f"  {name} files not read: {count:,} x {reason}" for reason, count in source["unread"].items()]
        lines += [f"  {name} faulty, skipped: {count:,} x {kind}" for kind, count in source["problems"].items()]
        if lost := source.get("files_lost"):
            lines.append(f"  {name} faulty, skipped: all records of {lost:,} files")
        lines += [f"    {line}" for line in source["problems_named"][:10]]
        lines += [f"  {name}: NO DOCUMENT of the set {missing!r}" for missing in source["sets_missing"]]
    for name, facts in record["settings"]["sources"].items():
        if facts.get("cut"):
            lines.append(f"  {name}: few documents, so the ends of long ones are validation and test text; {BY_LINE}")
        elif "train_from" in facts:
            lines.append(f"  {name}: few documents, which would all be held out, so one of them is used for training")
    for spec in (source.spec for source in sources if source.spec.reader == "files"):
        lines += [f"  {spec.name}: {each}: {REPOSITORIES}" for each in spec.paths if holds_repository(each)]
    config = path.parent / RUN_CONFIG
    if config.exists():
        splits = {split for split in SPLITS for entry in record["sources"] if entry[split]["documents"]}
        if "train" in splits:
            lines += empty_splits(record, sources)
            tokens = sum(entry["train"]["tokens"] for entry in record["sources"])
            model = next(model for least, model in MODELS if tokens >= least)
            lines.append(f"Train with: megatron-coca train {model} {config}")
        else:
            lines.append(f"there are only {', '.join(sorted(splits))} documents; training needs training documents")
    return "\n".join(lines)


def _sizes(entries: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (split, text) for the shards of a source or set."""
    for split in SPLITS:
        shards = [entry[split] for entry in entries if entry[split]["documents"]]
        documents, tokens, size = (sum(shard[name] for shard in shards) for name in ("documents", "tokens", "bytes"))
        text = f"{documents:,} documents, {tokens:,} tokens, {size / max(1, tokens):.2f} bytes per token"
        text += f", in {len(shards)} shards" if len(shards) > 1 else ""
        yield split, text if shards else "no document"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the data and return the exit status. Raises DataError, ClusterError."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(given)
    engine = engine_of(options)
    if engine is not None:
        return _run_on(engine, options, given)
    print(plain(_run(options)))
    return 0


def _run_on(engine: EngineSettings, options: argparse.Namespace, given: Sequence[str]) -> int:
    """Run the command line `given` in many tasks, and return the exit status."""
    _exclude(options, ["builtin", "part"], "not supported with --engine; leave it out")
    recipe, output = _recipe(options)
    rules = replace(recipe.rules, strict=options.strict)
    if (done := completed(recipe.sources, output, _tokenizer_source(recipe), rules, _notes(recipe))) is not None:
        print(plain(_summary(done, recipe.sources)))
        return 0
    blocks, shards = count_tasks(recipe.sources, recipe.rules, output)
    most = MOST_TASKS if engine.tasks is None else engine.tasks
    line = ["prepare", *without_engine(given)]
    workers = options.workers
    if workers is None:
        workers = engine.cpus if engine.cpus > 1 else 0
        line += ["--workers", str(workers)]
    counts = min(most, blocks), min(most, -(-shards // max(1, workers)))
    step, second = (CommandTask(tuple(line), Path.cwd(), tasks, tuple(range(tasks))) for tasks in counts)
    logs = output.with_name(f".{output.name}.tasks")
    finish = CommandTask(tuple(line), Path.cwd())
    return run(engine, step, finish, logs, second if shards > 1 else None)  # the last task writes a few shards itself
