"""The tasks of evaluate.py: what each asks on the command line and what it runs."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_coca.attention.backends.select import BACKENDS
from megatron_coca.attention.inputs import BackendError
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.checkpoints import CheckpointError, Loaded, load_checkpoint
from megatron_coca.config import Config, ConfigError
from megatron_coca.data import (
    DataError,
    Tokenizer,
    ensure_builtin,
    load_saved_tokenizer,
    load_tokenizer,
    read_manifest,
)
from megatron_coca.evaluation.documents import Documents, collect_documents
from megatron_coca.evaluation.perplexity import PROTOCOL, check_windows, sliding_window_perplexity
from megatron_coca.evaluation.report import build_report, format_table
from megatron_coca.evaluation.results import (
    CheckpointRecord,
    EnvironmentRecord,
    EvaluationError,
    PerplexityResult,
    ProtocolRecord,
    WindowResult,
    check_writable,
    write_record,
)
from megatron_coca.model import keep_freed_memory

USER_ERRORS = (ConfigError, DataError, CheckpointError, BackendError, EvaluationError)
"""Errors that are told in one message, without a traceback."""


@dataclass(frozen=True)
class Task:
    """One subcommand of evaluate.py; `run` raises one of USER_ERRORS for anything the user can put right."""

    help: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], None]


def positive_int(text: str) -> int:
    """An argparse type."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def window_list(text: str) -> list[int]:
    """An argparse type: "512,1024"."""
    return [positive_int(part) for part in text.split(",")]


def resolve_device(name: str) -> str:
    """`auto` is the CUDA device where there is one. Raises EvaluationError for a device that is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise EvaluationError(f"device {name}: cannot be used here ({reason}); use auto or cpu") from error
    return name


def perplexity_arguments(parser: ArgumentParser) -> None:
    """`python evaluate.py perplexity`."""
    add = parser.add_argument
    add(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a run's save folder, one step of it, or a Hugging Face folder",
    )
    add("--windows", required=True, type=window_list, metavar="W,W,...", help="window sizes in tokens")
    add("--stride", required=True, type=positive_int, metavar="S", help="tokens scored by each window")
    changes = "change the extension or the backend of the trained model, e.g. rope_scaling.rope_type=dynamic"
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="overrides", help=changes)
    places = "text files, JSONL files, folders of them, or shard prefixes; default: the run's test data"
    add("--data", nargs="+", metavar="PATH", help=places)
    add("--num-documents", type=positive_int, metavar="N", help="only the first N that are long enough")
    lengths = "documents of at least N tokens, truncated to N; default: the largest window"
    add("--max-length", type=positive_int, metavar="N", help=lengths)
    add("--output", type=Path, metavar="FILE", help="where the result goes as JSON")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--tokens-per-batch", type=positive_int, default=16384, metavar="N", help="fewer need less memory")
    add("--label", help="the model's name in reports; default: the checkpoint's folder and the overrides")


def run_perplexity(args: Namespace) -> None:
    """Loads, measures, prints; the file is written anew after each window, so that a later failure loses none."""
    check_windows(args.windows, args.stride)
    if args.max_length is not None and args.max_length < max(args.windows):
        raise EvaluationError(f"--max-length {args.max_length} is shorter than the window {max(args.windows)}")
    if args.output is not None:
        check_writable(args.output)
    device = resolve_device(args.device)
    if device == "cpu":
        keep_freed_memory()
    loaded = load_checkpoint(args.checkpoint, args.overrides, device=device)
    tokenizer = find_tokenizer(loaded, Path(args.checkpoint))
    documents = collect_documents(
        args.data or default_data(loaded.config),
        tokenizer,
        loaded.config.model.vocab_size or loaded.config.model.padded_vocab_size,
        args.max_length or max(args.windows),
        args.num_documents,
    )
    result = describe(args, loaded, documents, tokenizer.fingerprint if tokenizer else None)
    for window in args.windows:
        result = result.model_copy(update={"results": [*result.results, measure(args, loaded, documents, window)]})
        if args.output is not None:
            write_record(args.output, result)
    print(console_table(result))


def find_tokenizer(loaded: Loaded, path: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint of ours or of a Hugging Face folder; None where there is none. Raises DataError."""
    if loaded.tokenizer_folder is not None:
        return load_saved_tokenizer(loaded.tokenizer_folder)
    if (path / "tokenizer.json").is_file():
        return load_tokenizer("HFTokenizer", path / "tokenizer.json")
    return None


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


def measure(args: Namespace, loaded: Loaded, documents: Documents, window: int) -> WindowResult:
    """One window size. Raises EvaluationError where the device's memory does not suffice."""
    try:
        return sliding_window_perplexity(
            loaded.model, documents.arrays, [window], args.stride, tokens_per_batch=args.tokens_per_batch
        )[0]
    except torch.OutOfMemoryError as error:
        raise EvaluationError(
            f"window {window}: the memory of {args.device} does not suffice; lower --tokens-per-batch (it is "
            f"{args.tokens_per_batch}, one window at least) or leave the window out"
        ) from error


def describe(args: Namespace, loaded: Loaded, documents: Documents, fingerprint: str | None) -> PerplexityResult:
    """The result file without results."""
    weight = next(loaded.model.parameters())
    backend = next(module.backend for module in loaded.model.modules() if isinstance(module, SelfAttention))
    config = loaded.config
    return PerplexityResult(
        label=args.label or " ".join([Path(args.checkpoint).resolve().name, *args.overrides]),
        protocol=ProtocolRecord(
            text=PROTOCOL, stride=args.stride, windows=args.windows, tokens_per_batch=args.tokens_per_batch
        ),
        checkpoint=CheckpointRecord(
            path=str(args.checkpoint),
            identity=loaded.identity,
            step=loaded.step,
            seq_length=config.model.seq_length,
            pos_emb=config.position.pos_emb,
        ),
        overrides=args.overrides,
        tokenizer=fingerprint,
        documents=documents.record(),
        environment=EnvironmentRecord(
            dtype=str(weight.dtype).removeprefix("torch."),
            backend=next(name for name, known in BACKENDS.items() if known is backend),
            device=torch.cuda.get_device_name(weight.device) if weight.is_cuda else str(weight.device),
            torch=torch.__version__,
        ),
        results=[],
    )


def console_table(result: PerplexityResult) -> str:
    """The result as a Markdown table."""
    rows = [
        f"{each.window} {each.perplexity:.3f} {each.nll:.4f} {each.tokens_scored} {each.tokens_per_second:.0f}".split()
        for each in result.results
    ]
    header = ["window", "perplexity", "nll", "tokens scored", "tokens/s"]
    place = f"{result.documents.count} documents, stride {result.protocol.stride}"
    return f"{result.label}: trained at {result.checkpoint.seq_length}, {place}\n\n{format_table(header, rows)}"


def report_arguments(parser: ArgumentParser) -> None:
    """`python evaluate.py report`."""
    add = parser.add_argument
    add("results", nargs="+", type=Path, metavar="RESULTS.json", help="files of evaluate.py perplexity --output")
    add("--output", required=True, type=Path, metavar="DIR", help="where report.json and report.png go")
    add("--title", default="Perplexity", help="title of table and plot")


def run_report(args: Namespace) -> None:
    """Merges, draws, prints."""
    print(build_report(args.results, args.output, args.title))


TASKS = {
    "perplexity": Task("sliding-window perplexity of a checkpoint", perplexity_arguments, run_perplexity),
    "report": Task("one table and plot out of several results", report_arguments, run_report),
}
"""Every subcommand by its name."""
