"""Run `megatron-coca prepare` under the name, and with the arguments, of GPT-NeoX's tools/datasets/preprocess_data.py.

    python tools/datasets/preprocess_data.py --input books.jsonl --output-prefix data/books --append-eod \\
        --tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --workers 4

The shard is PREFIX_text_document.bin and .idx, as in GPT-NeoX, for `data_path: data/books_text_document`. The folder
PREFIX_text_document contains the same shard, the tokenizer, the manifest and data.yml. All documents are kept, in their
order, as training documents; the key `split` divides them. `megatron-coca prepare` has more options.
"""

import os
import shutil
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_coca.cli import main
from megatron_coca.data.tokenizers import TOKENIZERS

SOURCE = "text"
"""Name of the only source. The names of its files in the output folder begin with it."""


def parser() -> ArgumentParser:
    described = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    add = described.add_argument
    add("--input", required=True, metavar="FILE,FILE,...", help="JSONL files, archives or folders")
    add(
        "--jsonl-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="record fields with the text; default: %(default)s",
    )
    add("--output-prefix", required=True, metavar="PREFIX", help="the shard is PREFIX_KEY_document.bin and .idx")
    add("--tokenizer-type", required=True, choices=list(TOKENIZERS))
    add("--vocab-file", "--vocab", metavar="FILE", help="vocabulary or model file of the tokenizer")
    add("--merge-file", metavar="FILE", help="merges file of the tokenizer, if there is one")
    add("--append-eod", action="store_true", help="required: documents always end with the end-of-document token")
    add("--dataset-impl", default="mmap", choices=("mmap", "lazy", "cached"), help="only mmap is supported")
    add("--workers", type=int, default=1, metavar="N", help="number of worker processes; default: %(default)s")
    add("--ftfy", action="store_true", help="not supported")
    add("--num-docs", type=int, metavar="N", help="no effect: the progress bar counts bytes")
    add("--log-interval", type=int, metavar="N", help="no effect")
    return described


def check(args: Namespace) -> str | None:
    """Return a message, with the remedy, if an argument has no equivalent here."""
    if not args.append_eod:
        return "--append-eod: not set, but documents always end with the end-of-document token; add it"
    if args.dataset_impl != "mmap":
        return f"--dataset-impl {args.dataset_impl}: not supported; use mmap"
    if args.ftfy:
        return "--ftfy: not supported; repair the texts first, and leave it out"
    if len(args.jsonl_keys) > 1:
        return "--jsonl-keys: several keys are not supported; run the command once for each key"
    return None


def prepare_line(args: Namespace, folder: str) -> list[str]:
    """Return the command line of `megatron-coca prepare` for these arguments."""
    line = ["prepare", "--input", *(f"{SOURCE}={path}" for path in args.input.split(",")), "--output", folder]
    line += ["--text-field", args.jsonl_keys[0], "--tokenizer-type", args.tokenizer_type]
    line += ["--vocab-file", args.vocab_file] if args.vocab_file else []
    line += ["--merge-file", args.merge_file] if args.merge_file else []
    line += ["--valid-fraction", "0", "--test-fraction", "0", "--duplicates", "keep"]
    return [*line, "--workers", str(args.workers if args.workers > 1 else 0)]


def place_shard(folder: Path) -> None:
    """Link the shard in `folder` to the path that GPT-NeoX's configurations use, beside the folder."""
    for suffix in (".bin", ".idx"):
        shard, wanted = folder / f"{SOURCE}_train{suffix}", Path(f"{folder}{suffix}")
        wanted.unlink(missing_ok=True)
        try:
            os.link(shard, wanted)
        except OSError:  # a file system without hard links
            shutil.copyfile(shard, wanted)


def run() -> int:
    described = parser()
    args = described.parse_args()
    if (problem := check(args)) is not None:
        described.error(problem)
    folder = f"{args.output_prefix}_{args.jsonl_keys[0]}_document"
    status = main(prepare_line(args, folder))
    if status == 0:
        place_shard(Path(folder))
        print(f"data_path: {folder}")
    return status


if __name__ == "__main__":
    sys.exit(run())
