"""The layout of Megatron's and GPT-NeoX's indexed data sets (``MMIDIDX``, ``data_impl: mmap``).

``.bin`` holds token ids and nothing else. ``.idx`` holds a header, the length of each sequence (int32), its first byte
in ``.bin`` (int64), and the first sequence of each document, with their number at the end (int64).
"""

import struct
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, entries of the document index
INTEGER_CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""The dtypes that hold tokens."""
SUFFIXES = (".bin", ".idx")


def shard_paths(prefix: str | Path) -> tuple[Path, Path]:
    """The two files of a shard."""
    tokens, index = (Path(f"{prefix}{suffix}") for suffix in SUFFIXES)
    return tokens, index


def token_dtype(vocab_size: int) -> type[np.integer]:
    """uint16 for fewer than 65,500 ids, else int32: GPT-NeoX's rule."""
    return np.uint16 if vocab_size < 65500 else np.int32


def dtype_code(dtype: np.dtype) -> int:
    """The number that stands for a dtype in the header."""
    return next(code for code, known in INTEGER_CODES.items() if np.dtype(known) == dtype.newbyteorder("="))
