"""Look at prepared data, and at what a run will read.

python tools/inspect_data.py sample configs/350M/roformer_coca.yml --number 1000 train_batch_size=64
python tools/inspect_data.py document data/mine/books_train 17
python tools/inspect_data.py lengths data/mine --output lengths.png
python tools/inspect_data.py mixture configs/350M/roformer_coca.yml
python tools/inspect_data.py duplicates data/mine
python tools/inspect_data.py utf8 data/mine --documents 1000
python tools/inspect_data.py coverage data/mine
python tools/inspect_data.py verify data/mine

The exit status is 1 where verify finds a fault, and 2 after input that cannot be used.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installing

from megatron_coca.config import Config, ConfigError, load_config  # noqa: E402
from megatron_coca.data.errors import DataError  # noqa: E402
from megatron_coca.data.inspection.collection import common_tokenizer, find_shards, plain, required  # noqa: E402
from megatron_coca.data.inspection.duplicates import duplicates_table, find_duplicates  # noqa: E402
from megatron_coca.data.inspection.samples import document_text, mixture, mixture_table, sample_text, view_sample  # noqa: E402  # noqa: E402
from megatron_coca.data.inspection.statistics import (
    check_picture,
    coverage_facts,
    coverage_table,
    lengths_by_source,
    lengths_table,
    measure_coverage,
    plot_lengths,
)
from megatron_coca.data.inspection.text_faults import find_text_faults, text_faults_table  # noqa: E402
from megatron_coca.data.inspection.verify import verified_table, verify_shards  # noqa: E402
from megatron_coca.data.order import Blend  # noqa: E402
from megatron_coca.data.shards import Shard  # noqa: E402
from megatron_coca.data.tokenizers.kinds import Tokenizer  # noqa: E402
from megatron_coca.data.tokenizers.load import TOKENIZERS, load_tokenizer  # noqa: E402
from megatron_coca.training.corpus import SPLITS, Corpus, open_corpus, open_split  # noqa: E402


class Result(NamedTuple):
    """What to print, the numbers for --json, and whether something is wrong with the data."""

    text: str
    facts: Any
    faulty: bool = False


def _config(options: argparse.Namespace) -> Config:
    return load_config([text for text in options.inputs if "=" not in text], [t for t in options.inputs if "=" in t])


def _blend(corpus: Corpus, split: str) -> Blend:
    opened = {"train": corpus.train, "valid": corpus.valid}
    blend = opened[split] if split in opened else open_split(corpus.config, split)
    if blend is None:
        raise DataError(f"The configuration names no data for {split}.")
    return blend


def _tokenizer(options: argparse.Namespace) -> Tokenizer | None:
    """The one that the command line names."""
    if options.tokenizer_type is None:
        return None
    return load_tokenizer(options.tokenizer_type, options.vocab_file, options.merge_file, options.eod)


def _sample(options: argparse.Namespace) -> Result:
    corpus = open_corpus(_config(options))
    view = view_sample(_blend(corpus, options.split), options.number)
    return Result(sample_text(view, required(corpus.tokenizer), options.tokens), view.facts())


def _mixture(options: argparse.Namespace) -> Result:
    corpus = open_corpus(_config(options))
    samples = options.samples
    if samples is None:
        steps = corpus.config.schedule.train_iters
        if steps is None:
            raise DataError("The configuration has no train_iters. Set it, or say --samples.")
        samples = steps * corpus.config.batch.resolve(options.ranks).total
    found = mixture(_blend(corpus, options.split), samples)
    return Result(mixture_table(found), {"samples": samples, "sources": [source.facts() for source in found]})


def _document(options: argparse.Namespace) -> Result:
    entries = find_shards([options.prefix])
    if len(entries) != 1:
        raise DataError(f"{options.prefix}: is not one shard. Give a prefix, the path without .bin or .idx.")
    tokenizer = required(common_tokenizer(entries, _tokenizer(options)))
    shard = Shard(entries[0].prefix)
    text = document_text(shard, options.number, tokenizer, options.tokens)
    tokens = len(shard.document(options.number))
    return Result(text, {"prefix": entries[0].prefix, "number": options.number, "tokens": tokens})


def _lengths(options: argparse.Namespace) -> Result:
    if options.output is not None:
        check_picture(options.output)
    found = lengths_by_source(find_shards(options.shards))
    if options.output is not None:
        plot_lengths(found, options.output)
    return Result(lengths_table(found), {source: lengths.facts() for source, lengths in found.items()})


def _duplicates(options: argparse.Namespace) -> Result:
    entries = find_shards(options.shards)
    tokenizer = common_tokenizer(entries, _tokenizer(options))
    found = find_duplicates(entries, show=True, workplace=options.workplace)
    return Result(duplicates_table(found, tokenizer), found.facts())


def _utf8(options: argparse.Namespace) -> Result:
    entries = find_shards(options.shards)
    tokenizer = required(common_tokenizer(entries, _tokenizer(options)))
    found = find_text_faults(entries, tokenizer, options.documents, show=True)
    return Result(text_faults_table(found), [faults.facts() for faults in found])


def _coverage(options: argparse.Namespace) -> Result:
    entries = find_shards(options.shards)
    tokenizer = required(common_tokenizer(entries, _tokenizer(options)))
    facts = coverage_facts(measure_coverage(entries, tokenizer, show=True), tokenizer)
    return Result(coverage_table(facts), facts)


def _verify(options: argparse.Namespace) -> Result:
    found = verify_shards(find_shards(options.shards), _tokenizer(options), show=True)
    return Result(verified_table(found), [each.facts() for each in found], any(each.faults for each in found))


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def _reads_config(command: argparse.ArgumentParser) -> None:
    command.add_argument("inputs", nargs="+", metavar="CONFIG.yml | key=value", help="as train.py takes them")
    command.add_argument("--split", choices=SPLITS, default="train")


def _reads_shards(command: argparse.ArgumentParser) -> None:
    command.add_argument("shards", nargs="+", metavar="PREFIX | FOLDER", help="shards, or folders of them")


def _has_tokenizer(command: argparse.ArgumentParser) -> None:
    named = command.add_argument_group("tokenizer", "where none lies beside the shards")
    named.add_argument("--tokenizer-type", choices=list(TOKENIZERS))
    named.add_argument("--vocab-file", type=Path)
    named.add_argument("--merge-file", type=Path)
    named.add_argument("--eod", help="symbol that ends documents, where it is not the usual one")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = options.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], Result], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
        added.set_defaults(run=run)
        return added

    sample = command("sample", _sample, "decode a sample of a run")
    _reads_config(sample)
    sample.add_argument("--number", type=int, required=True, help="in the run's order, from 0")
    sample.add_argument("--tokens", action="store_true", help="show id:piece of each token")
    mixed = command("mixture", _mixture, "what a run takes from each source")
    _reads_config(mixed)
    mixed.add_argument("--samples", type=_count, help="default: train_iters times the batch")
    mixed.add_argument("--ranks", type=_count, default=1, help="processes, where no train_batch_size is set")
    document = command("document", _document, "decode one document of a shard")
    document.add_argument("prefix", type=Path)
    document.add_argument("number", type=int, help="from 0")
    document.add_argument("--tokens", action="store_true", help="show id:piece of each token")
    lengths = command("lengths", _lengths, "how long documents are, by source, from the indices alone")
    lengths.add_argument("--output", type=Path, metavar="FILE.png", help="draw the histogram")
    duplicates = command("duplicates", _duplicates, "documents with equal tokens, within shards and across them")
    duplicates.add_argument("--workplace", type=Path, help="folder for temporary files, 28 bytes a document")
    utf8 = command("utf8", _utf8, "documents that went through a wrong decoding or hold control characters")
    utf8.add_argument("--documents", type=_count, help="of each shard, spread evenly; default all")
    coverage = command("coverage", _coverage, "how the vocabulary is used, by source")
    verify = command("verify", _verify, "compare shards with their manifest, index and vocabulary; reads all tokens")
    for added in (lengths, duplicates, utf8, coverage, verify):
        _reads_shards(added)
    for added in (document, duplicates, utf8, coverage, verify):
        _has_tokenizer(added)
    return options


def read_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; keys of a configuration may stand behind options, where argparse alone has no place for them."""
    options, rest = parser().parse_known_args(arguments)
    if rest and not (hasattr(options, "inputs") and all("=" in text and not text.startswith("-") for text in rest)):
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.inputs += rest
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0, 1 where it found the data faulty, or 2 after an error of the input, which is printed without
    a traceback.
    """
    options = read_arguments(arguments)
    try:
        result = options.run(options)
        print(result.text)
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(plain(result.facts), indent=1) + "\n")
    except (DataError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return int(result.faulty)


if __name__ == "__main__":
    sys.exit(main())
