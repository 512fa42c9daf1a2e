"""`evaluate.py speed`: time and memory of position methods, measured side by side in one run."""

from typing import Literal, get_args

from megatron_coca import methods

What = Literal["layer forward", "layer forward+backward", "model forward", "model forward+backward", "decode"]
WHATS: tuple[What, ...] = get_args(What)
"""The kinds of work that are timed."""
CONTRACTION = "contraction"
"""CoCA as its paper computes it, among the values of `--methods`."""
METHODS = (*methods.TABLES["pos_emb"], CONTRACTION)
WHOLE_SEQUENCES = "the contraction computes whole sequences only"
"""The reason why the contraction has no cells of decoding."""
