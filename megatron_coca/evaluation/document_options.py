"""Which documents a task reads: what it asks on the command line, and the run's own test data by default."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_coca.config import Config
from megatron_coca.data import ensure_builtin, read_manifest
from megatron_coca.evaluation.documents import Documents, collect_documents
from megatron_coca.evaluation.options import positive_int
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.subject import Source


def add_document_options(parser: ArgumentParser) -> None:
    """Which documents are read."""
    add = parser.add_argument
    places = "text files, JSONL files, folders of them, or shard prefixes; default: the run's test data"
    add("--data", nargs="+", metavar="PATH", help=places)
    add("--num-documents", type=positive_int, metavar="N", help="only the first N that are long enough")
    lengths = "documents of at least N tokens, truncated to N; default: the largest window or length"
    add("--max-length", type=positive_int, metavar="N", help=lengths)
    repeated = "make each document of its first N tokens, again and again up to --max-length"
    add("--repeat", type=positive_int, metavar="N", help=repeated)


def read_subject_documents(args: Namespace, source: Source, longest: int) -> Documents:
    """What `add_document_options` ask for, at least `longest` tokens each. Raises EvaluationError, DataError."""
    if args.max_length is not None and args.max_length < longest:
        raise EvaluationError(f"--max-length {args.max_length} is shorter than the window {longest}")
    trained = source.opened.trained
    return collect_documents(
        args.data or default_data(trained),
        source.tokenizer,
        trained.model.vocab_size or trained.model.padded_vocab_size,
        args.max_length or longest,
        args.num_documents,
        repeated=args.repeat,
    )


def default_data(config: Config) -> list[str]:
    """The run's own test shards; those of the built-in corpus where the run names no data at all.

    Raises EvaluationError for a run that names training data only, DataError where the corpus cannot be made.
    """
    if config.data.test_data_paths:
        return list(config.data.test_data_paths)
    if config.data.data_path or config.data.train_data_paths:
        raise EvaluationError("the run's config has no test_data_paths; name text files or shard prefixes with --data")
    manifest = ensure_builtin(Path(config.data.data_root))
    prefixes = [source["test"]["prefix"] for source in read_manifest(manifest)["sources"]]
    return [str(manifest.parent / prefix) for prefix in prefixes if prefix is not None]
