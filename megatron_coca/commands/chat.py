"""Talk with a model that has a chat template: `megatron-coca generate --chat` in short.

megatron-coca chat models/Qwen3-0.6B
megatron-coca chat runs/chat --system "Answer in one sentence." --temperature 0.7

All options of `megatron-coca generate` may follow the model.
"""

from collections.abc import Sequence

from megatron_coca.commands import command_parser, generate


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold the conversation and return 0. Raises InputError."""
    given = list(arguments or ())
    parser = command_parser("chat", __doc__)
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, hf://NAME or a run's save folder")
    model = parser.parse_args(given[:1]).model
    return generate.main(["--chat", "--checkpoint", model, *given[1:]])
