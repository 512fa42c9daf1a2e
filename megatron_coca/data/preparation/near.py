"""Near duplicates by MinHash and locality-sensitive hashing.

A text is the set of its runs of ``SHINGLE_WORDS`` words, without regard to case and punctuation; in scripts that put no
space between words a character counts as one. Its signature holds
``BANDS * ROWS`` minima of hash functions (Broder, 1997); two texts whose sets have Jaccard similarity s agree in at
least one whole band with probability 1 - (1 - s**ROWS)**BANDS: 0.05 at 0.5, 0.56 at 0.7, 0.77 at 0.75, 0.92 at 0.8,
0.99 at 0.85. Numbers of bands and rows are FineWeb's (Penedo et al., 2024).
"""

import re
from collections.abc import Sequence

import numpy as np

from megatron_coca.data.errors import DataError

SHINGLE_WORDS = 5
BANDS = 14
ROWS = 8
# Thai and Lao, Myanmar, Khmer, kana, Han: no spaces.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


def band_hashes(texts: Sequence[str]) -> np.ndarray:
    """One hash per band of each text: uint64 [texts, BANDS]. Texts that share one are near duplicates.

    Raises ``DataError`` where datasketch is not installed.
    """
    try:
        from datasketch import MinHash
    except ImportError as error:
        raise DataError("Removing near duplicates needs the datasketch package: pip install datasketch") from error
    signatures = np.empty((len(texts), BANDS * ROWS), dtype=np.uint64)
    for row, text in zip(signatures, texts, strict=True):
        sketch = MinHash(num_perm=BANDS * ROWS, seed=1)
        sketch.update_batch(_shingles(text))
        row[:] = sketch.hashvalues
    return _folded(signatures.reshape(len(texts), BANDS, ROWS))


def _shingles(text: str) -> list[bytes]:
    words = _WORD.findall(text.lower())
    if len(words) < SHINGLE_WORDS:
        return [text.encode()]  # too short to be like another one without being the same
    return list({" ".join(words[i : i + SHINGLE_WORDS]).encode() for i in range(len(words) - SHINGLE_WORDS + 1)})


def _folded(rows: np.ndarray) -> np.ndarray:
    """uint64 [..., ROWS] to uint64 [...], each band with a start of its own: FNV-1a by 64-bit words."""
    folded = np.broadcast_to(np.arange(1, BANDS + 1, dtype=np.uint64), rows.shape[:-1]).copy()
    for column in range(rows.shape[-1]):
        folded = (folded ^ rows[..., column]) * np.uint64(0x100000001B3)
        folded ^= folded >> np.uint64(32)
    return folded
