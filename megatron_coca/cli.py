"""The command `megatron-coca`.

The module of a subcommand is imported only when the subcommand runs, so that help and errors appear at once.
"""

import errno
import logging
import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from megatron_coca import __version__
from megatron_coca.support.errors import NO_SPACE, UNUSABLE, InputError, report, why_not_written
from megatron_coca.support.open_files import TOO_MANY_FILES, allow_open_files
from megatron_coca.support.output import drop_closed_streams, drop_output, losses, open_missing_streams, survive
from megatron_coca.support.plain_text import PlainFormatter, plain
from megatron_coca.work.workers import safe_path

COMMANDS = {
    "train": ("commands.train", "train a model"),
    "evaluate": ("commands.evaluate", "evaluate checkpoints and write reports"),
    "generate": ("commands.generate", "generate continuations of prompts"),
    "chat": ("commands.chat", "talk with a model that has a chat template"),
    "prepare": ("commands.prepare", "prepare training data from text files"),
    "status": ("commands.status", "show the state, progress and restarts of runs"),
    "requeue": ("commands.requeue", "decide whether a Slurm job is requeued; slurm.sbatch calls it"),
    "inspect": ("commands.inspect", "show and verify prepared data, training samples and checkpoints"),
    "download": ("commands.download", "download a model from the Hugging Face Hub and check it"),
    "import": ("commands.import_checkpoint", "import Hugging Face and GPT-NeoX models"),
    "export": ("commands.export", "export checkpoints to Hugging Face or GPT-NeoX"),
    "serve": ("commands.serve", "print the commands that serve an export, or why there are none"),
    "stretch": ("commands.stretch", "compare methods that extend a model beyond its training length"),
    "estimate": ("commands.estimate", "estimate the parameters, memory and duration of a run"),
    "ablate": ("commands.ablate", "train and evaluate a grid of models"),
    "quickstart": ("commands.quickstart", "train small models, kill and resume one run, and evaluate all models"),
    "configs": ("commands.configs", "copy the configuration files"),
}
"""The module that contains `main`, and the help text, of each subcommand."""

REMOVED = {"train-tokenizer": "use prepare --train-tokenizer VOCAB_SIZE"}
"""Removed subcommands, with the replacement."""

ELSEWHERE = {
    "convert": "import or export",
    "finetune": "train MODEL data.yml",
    "tokenize": "prepare",
    "preprocess": "prepare",
}
"""Names that other programs give to what a subcommand of this program does."""

RESUMABLE = ("prepare", "download", "ablate", "stretch")

WRITES_FILES = ("train", "prepare", "download", "import", "export", "stretch", "ablate", "quickstart")
"""Subcommands whose results are files. They end their work even if nobody can read their output."""

EPILOG = """for example:
    megatron-coca configs copy configs
    megatron-coca train configs/quickstart/roformer_coca.yml
    megatron-coca evaluate perplexity --checkpoint runs/quickstart/roformer_coca --windows 64,256 --stride 64

`megatron-coca COMMAND --help` describes a command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    The status is 2 for invalid input, a missing library or a full disk, 69 if an object store does not answer, 130
    after Ctrl-C, and 141 if nobody reads the rest of a result that is printed, as with `| head`. Messages on standard
    error that cannot be written never change the status.
    """
    open_missing_streams()
    survive("stderr")
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            sys.stdout.flush()  # also after --help, which ends with SystemExit
    except BrokenPipeError:
        if not drop_closed_streams():
            raise
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        drop_output(sys.stdout)  # otherwise the flush at exit would fail again
        named = error.filename or "the output or a file"
        print(plain(f"megatron-coca: {named}: {why_not_written(error, 'write elsewhere')}"), file=sys.stderr)
        return UNUSABLE
    finally:
        for text in losses():
            print(f"megatron-coca: {text}", file=sys.stderr)


def _run(given: Sequence[str]) -> int:
    missing = [name for name in ("torch", "pydantic") if find_spec(name) is None]
    if missing:
        print(outside(missing), file=sys.stderr)
        return 2
    name = command(given[:1])
    if name in WRITES_FILES:
        survive("stdout")
    allow_open_files()
    if logging.lastResort is not None:  # prints warnings of commands that do not set up logging
        logging.lastResort.setFormatter(PlainFormatter())
    try:
        with safe_path():
            return int(import_module(f"megatron_coca.{COMMANDS[name][0]}").main(given[1:]))
    except InputError as error:
        report(name, error)
        return error.status
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        report(name, InputError(f"{error.filename or 'files'}: {TOO_MANY_FILES}"))
        return UNUSABLE
    except KeyboardInterrupt:
        resumes = "; the same command resumes" if name in RESUMABLE else ""
        print(f"megatron-coca {name}: interrupted{resumes}", file=sys.stderr)
        return 130


def command(arguments: Sequence[str]) -> str:
    """Return the name of the subcommand. argparse exits after --help, --version and errors."""
    parser = ArgumentParser(
        prog="megatron-coca",
        description="Train and evaluate position methods for long context.",
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-coca {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        from megatron_coca.config.base import nearest

        if arguments[0] in REMOVED:
            parser.error(f"{arguments[0]!r} was removed; {REMOVED[arguments[0]]}")
        if arguments[0] in ELSEWHERE:
            parser.error(f"{arguments[0]!r} is not a command; use {ELSEWHERE[arguments[0]]}")
        hint = nearest(arguments[0], COMMANDS) or f"; use one of {', '.join(COMMANDS)}"
        parser.error(f"{arguments[0]!r} is not a command{hint}")
    return str(parser.parse_args(arguments).command)


def outside(missing: Sequence[str]) -> str:
    """Return the error message for missing libraries. Its remedy names an environment that contains them."""
    root = Path(__file__).resolve().parents[1]
    if (root / ".venv/bin/python").exists():
        remedy = f"run {root}/.venv/bin/python instead of python, or `source {root}/.venv/bin/activate` first"
    elif (root / "Makefile").exists():
        remedy = f"`make quickstart` in {root} creates the environment .venv; then run .venv/bin/python"
    else:
        remedy = "install megatron-coca with its dependencies: pip install megatron-coca"
    return f"{', '.join(missing)}: not installed for {sys.executable} ({sys.version.split()[0]}); {remedy}"


if __name__ == "__main__":
    sys.exit(main())
