"""Print the commands with which other programs serve an export, or why they cannot.

megatron-coca serve exported/coca
megatron-coca serve exported/coca --length 8192

FOLDER is a Hugging Face folder, such as `megatron-coca export huggingface` writes, or a folder with PEFT adapters.
The command starts nothing. docs/serving.md says what was run with which version.
"""

from collections.abc import Sequence

from megatron_coca.commands import command_parser, count
from megatron_coca.support.arguments import local_path
from megatron_coca.support.plain_text import plain


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the commands, and return 0. Raises CheckpointError."""
    parser = command_parser("serve", __doc__)
    parser.add_argument("folder", type=local_path, metavar="FOLDER", help="a Hugging Face folder or PEFT adapters")
    longest = "the longest input in tokens; default: the length in the folder's config.json"
    parser.add_argument("--length", type=count, metavar="N", help=longest)
    args = parser.parse_args(arguments)
    from megatron_coca.checkpoints.huggingface.serving import servings, text_of

    print(plain(text_of(servings(args.folder, args.length))))
    return 0
