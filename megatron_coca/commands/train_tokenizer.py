r"""Train a tokenizer on a corpus, and measure it on text held out from the training.

    megatron-coca train-tokenizer recipe.yml --vocab-size 32000 --output data/tokenizer
    megatron-coca train-tokenizer --input books=books.jsonl.zst code=src/ --type HFTokenizer --vocab-size 50304 \
        --output data/tokenizer
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_coca.atomic_write import atomic_dir
from megatron_coca.commands import command_parser, count
from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Rules, check, training_texts
from megatron_coca.data.preparation.recipe import named_paths, read_recipe
from megatron_coca.data.readers.source import SourceSpec
from megatron_coca.data.tokenizers import TOKENIZERS
from megatron_coca.data.tokenizers.training import TRAINERS, HeldOut, check_vocabulary, measure
from megatron_coca.markdown_tables import format_table

REPORT = "training.json"
HEADER = ("source", "trained on: characters", "held out: documents", "bytes", "tokens", "bytes per token", "exact")


def parser() -> argparse.ArgumentParser:
    options = command_parser("train-tokenizer", __doc__)
    options.add_argument(
        "recipe", nargs="?", type=Path, help="recipe, as for `megatron-coca prepare`; its sources and weights are used"
    )
    options.add_argument("--input", nargs="+", metavar="NAME=PATH", help="instead of a recipe; a name may be repeated")
    options.add_argument("--text-field", help="with --input: field of a JSON record that contains its text")
    options.add_argument("--root", type=Path, help="replaces the recipe's root folder")
    options.add_argument(
        "--valid-fraction", type=float, help="with --input: fraction held out, as in `megatron-coca prepare` (0.01)"
    )
    options.add_argument("--test-fraction", type=float, help="with --input: the same (0.01)")
    options.add_argument("--type", choices=list(TRAINERS), default="SPMTokenizer", help="default SPMTokenizer")
    options.add_argument("--model", choices=["bpe", "unigram"], default="bpe", help="default bpe")
    options.add_argument(
        "--vocab-size", type=count, required=True, help="vocabulary size, including bytes and special tokens"
    )
    options.add_argument(
        "--characters", type=count, default=50_000_000, help="characters of text to train on (default 50 million)"
    )
    options.add_argument(
        "--equal", action="store_true", help="the same amount of text from each source, regardless of weights"
    )
    options.add_argument("--output", type=Path, required=True, help="folder to make")
    return options


def read_sources(options: argparse.Namespace) -> tuple[list[CorpusSource], Rules]:
    """The sources and rules of the recipe, or of ``--input``."""
    if (options.recipe is None) == (options.input is None):
        raise DataError("Name either a recipe or --input NAME=PATH ...")
    fractions = {
        name: value for name in ("valid_fraction", "test_fraction") if (value := getattr(options, name)) is not None
    }
    if options.recipe is not None:
        if options.text_field is not None or fractions:
            raise DataError("--text-field, --valid-fraction and --test-fraction need --input; a recipe sets its own.")
        recipe = read_recipe(options.recipe, options.root)
        return recipe.sources, recipe.rules
    fields = {"text": options.text_field} if options.text_field else {}
    sources = [
        CorpusSource(SourceSpec(name, paths, fields=fields)) for name, paths in named_paths(options.input).items()
    ]
    return sources, Rules(**fractions)


def shares(sources: Sequence[CorpusSource], characters: int, equal: bool) -> list[int]:
    """Characters to read from each source: by weight where they have weights, else an equal share."""
    weights = [1.0 if equal or source.weight is None else source.weight for source in sources]
    return [int(characters * weight / sum(weights)) for weight in weights]


def _training_texts(
    sources: Sequence[CorpusSource], rules: Rules, wanted: Sequence[int], held_out: dict[str, HeldOut]
) -> Iterator[str]:
    """Yield the texts to train on; held-out texts go to ``held_out``, by source."""
    for source, share in zip(sources, wanted, strict=True):
        yield from held_out[source.spec.name].rest(training_texts([source], rules, share))


def train(options: argparse.Namespace) -> str:
    """Train, measure and write; return the text to print."""
    sources, rules = read_sources(options)
    check(sources, rules)
    check_vocabulary(options.type, options.vocab_size)
    if options.model not in TRAINERS[options.type]:
        raise DataError(
            f"--model {options.model}: {options.type} can only be trained as {', '.join(TRAINERS[options.type])}."
        )
    if options.characters < len(sources):
        raise DataError(f"--characters {options.characters} is less than one for each source.")
    wanted = shares(sources, options.characters, options.equal)
    held_out = {source.spec.name: HeldOut() for source in sources}
    file_name = TOKENIZERS[options.type][1]["vocab_file"]
    with atomic_dir(options.output, DataError) as folder:
        texts = _training_texts(sources, rules, wanted, held_out)
        tokenizer = TRAINERS[options.type][options.model](texts, options.vocab_size, folder / file_name)
        tokenizer.save(folder)
        measures = {name: measure(tokenizer, held.texts) for name, held in held_out.items()}
        report = {
            "settings": {
                name: getattr(options, name) for name in ("type", "model", "vocab_size", "characters", "equal")
            },
            "fingerprint": tokenizer.fingerprint,
            "sources": {
                name: {"trained_characters": held_out[name].characters, "held_out": asdict(measured)}
                for name, measured in measures.items()
            },
        }
        (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    rows = [
        (name, held_out[name].characters, m.documents, m.bytes, m.tokens, m.bytes_per_token, m.exact)
        for name, m in measures.items()
    ]
    lines = [format_table(HEADER, rows), ""]
    unmeasured = [name for name, measured in measures.items() if not measured.documents]
    if unmeasured:
        lines += [f"not measured, with fewer than two documents: {', '.join(unmeasured)}", ""]
    return "\n".join([*lines, f"tokenizer_type: {options.type}", f"vocab_file: {options.output / file_name}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0. Raises DataError."""
    print(train(parser().parse_args(arguments)))
    return 0
