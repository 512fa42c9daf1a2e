"""Prepare a corpus for training: JSONL or text files to tokenized shards with a manifest, or the built-in corpus.

python tools/prepare_data.py --builtin
python tools/prepare_data.py --input books=books.jsonl.zst code=src/ --train-tokenizer 32000 --output data/mine
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installing

from megatron_coca.data.builtin import VOCAB_SIZE, prepare_builtin  # noqa: E402
from megatron_coca.data.errors import DataError  # noqa: E402
from megatron_coca.data.prepare import SourceSpec, prepare, read_manifest, training_texts  # noqa: E402
from megatron_coca.data.tokenizers.kinds import Tokenizer  # noqa: E402
from megatron_coca.data.tokenizers.load import TOKENIZERS, load_tokenizer, train_sentencepiece  # noqa: E402

TOKENIZER_CHARACTERS = 50_000_000


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    corpus = parser.add_mutually_exclusive_group(required=True)
    corpus.add_argument("--builtin", action="store_true", help="the corpus inside this Python installation")
    corpus.add_argument("--input", nargs="+", metavar="NAME=PATH", help="files or folders; a name may occur again")
    parser.add_argument("--output", type=Path, help="folder to make (with --builtin: its parent, default data)")
    parser.add_argument("--tokenizer-type", choices=list(TOKENIZERS), help="with --vocab-file and --merge-file")
    parser.add_argument("--vocab-file", type=Path)
    parser.add_argument("--merge-file", type=Path)
    parser.add_argument("--train-tokenizer", type=int, metavar="VOCAB_SIZE", help="train SentencePiece on the input")
    parser.add_argument("--text-field", default="text", help="field of a JSON record that holds its text")
    parser.add_argument("--test-fraction", type=float, default=0.03, help="of the documents, by a hash of their key")
    parser.add_argument("--strict", action="store_true", help="stop at the first record that cannot be used")
    return parser


def _sources(inputs: list[str], text_field: str) -> list[SourceSpec]:
    paths: dict[str, list[Path]] = {}
    for item in inputs:
        name, separator, path = item.partition("=")
        if not (name and separator and path):
            raise DataError(f"--input {item}: give each as NAME=PATH, for example books=books.jsonl.zst")
        paths.setdefault(name, []).append(Path(path))
    return [SourceSpec(name, found, text_field) for name, found in paths.items()]


def _prepare(arguments: argparse.Namespace, tokenizer: Tokenizer, sources: list[SourceSpec]) -> Path:
    return prepare(sources, arguments.output, tokenizer, arguments.test_fraction, arguments.strict)


def _run(arguments: argparse.Namespace) -> Path:
    if arguments.builtin:
        return prepare_builtin(arguments.output or Path("data"), arguments.train_tokenizer or VOCAB_SIZE)
    if arguments.output is None or (arguments.tokenizer_type is None) == (arguments.train_tokenizer is None):
        raise DataError("--input needs --output, and either --tokenizer-type or --train-tokenizer.")
    sources = _sources(arguments.input, arguments.text_field)
    if arguments.tokenizer_type:
        tokenizer = load_tokenizer(arguments.tokenizer_type, arguments.vocab_file, arguments.merge_file)
        return _prepare(arguments, tokenizer, sources)
    with tempfile.TemporaryDirectory() as folder:
        texts = training_texts(sources, arguments.test_fraction, TOKENIZER_CHARACTERS)
        tokenizer = train_sentencepiece(texts, arguments.train_tokenizer, Path(folder) / "tokenizer.model")
    return _prepare(arguments, tokenizer, sources)


def _summary(path: Path) -> str:
    lines = [f"{path}"]
    for source in read_manifest(path)["sources"]:
        for split in ("train", "test"):
            report = source[split]
            lines.append(f"  {source['name']} {split}: {report['documents']:,} documents, {report['tokens']:,} tokens")
        lines += [f"  {source['name']} skipped: {count:,} x {kind}" for kind, count in source["problems"].items()]
        lines += [f"    {line}" for line in source["problems_named"][:10]]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0, or 2 after an error of the input, which is printed without a traceback."""
    try:
        print(_summary(_run(_parser().parse_args(argv))))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
