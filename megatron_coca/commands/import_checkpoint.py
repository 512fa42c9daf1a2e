"""Import a Hugging Face folder, or any other readable checkpoint; see docs/checkpoints.md, "Import".

megatron-coca import models/pythia-410m runs/pythia --set pos_emb=coca
"""

import sys
from collections.abc import Sequence

from megatron_coca.commands import command_parser
from megatron_coca.evaluation.options import DTYPES
from megatron_coca.support.arguments import add_source_options, expanded, source_keys
from megatron_coca.support.plain_text import plain


def main(arguments: Sequence[str] | None = None) -> int:
    """Import the checkpoint and return 0. Raises CheckpointError, ConfigError, DataError."""
    parser = command_parser("import", __doc__)
    add = parser.add_argument
    add(
        "source",
        type=expanded,
        metavar="SOURCE",
        help="a Hugging Face folder, or any other checkpoint that `megatron-coca evaluate` can read",
    )
    add("folder", type=expanded, metavar="FOLDER", help="new folder to write")
    changes = "overrides for the imported configuration, e.g. pos_emb=coca for GPT-NeoX folders by CoCA's authors"
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="overrides", help=changes)
    add_source_options(parser)
    add("--dtype", choices=DTYPES, help="dtype of the weights; default: as in the source")
    args = parser.parse_args(arguments)
    from megatron_coca.checkpoints.importing import import_checkpoint

    done = import_checkpoint(args.source, args.folder, [*args.overrides, *source_keys(args)], args.dtype)
    print(f"{done.folder}: {done.parameters:,} parameters, pos_emb {done.config.position.pos_emb}, weights only")
    kept = "sampling defaults and the tokenizer's rules for special tokens are not imported"
    remedy = f"{kept}; export with --tokenizer {done.huggingface_folder} to copy them from the source"
    for note in filter(None, (done.tokenizer_note, remedy if done.huggingface_folder is not None else None)):
        print(plain(f"megatron-coca import: {note}"), file=sys.stderr)
    return 0
