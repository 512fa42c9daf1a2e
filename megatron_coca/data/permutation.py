"""Permutations and random words that depend only on a key. They are the same on every machine, and no array has to be
stored.
"""

import hashlib

import numpy as np

ROUNDS = 8
_MASK64 = (1 << 64) - 1


def derive_key(*parts: int | str) -> int:
    """Derive a 64-bit key from integers and strings. The key is the same on every machine and with every Python
    version.
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


def _mix(values: np.ndarray, key: int) -> np.ndarray:
    """Hash uint64 values with the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    mixed = values + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def random_words(numbers: np.ndarray, count: int, key: int, first: int = 0) -> np.ndarray:
    """Return random words, uint64 [n, count]. `numbers` is int64 [n]. The word in column c of row i depends only on the
    64-bit `key`, on `numbers[i]` and on `first` + c.
    """
    rows = _mix(numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15), key)
    return _mix(rows[:, None] + np.arange(first, first + count, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03), key)


def _feistel(values: np.ndarray, bits: int, key: int) -> np.ndarray:
    """Return the images of `values` under a permutation of `[0, 2**bits)`. The two halves of the bits may differ in
    width, because each round changes only one half, in place.
    """
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    for number in range(ROUNDS):
        round_key = (key + (number + 1) * 0x9E3779B97F4A7C15) & _MASK64
        if number % 2:
            low = low ^ (_mix(high, round_key) & low_mask)
        else:
            high = high ^ (_mix(low, round_key) & high_mask)
    return (high << low_bits) | low


def permute(indices: np.ndarray, n: int, key: int) -> np.ndarray:
    """Return the images of `indices` (any shape) under a permutation of [0, n) that a 64-bit `key` determines; n is at
    most 2^62.

    The result is int64 with the shape of `indices`. No array of size `n` is stored: a Feistel network permutes the
    range up to the next power of two. For an image outside [0, n), the network is applied again until the image is
    inside; this method is called cycle walking.
    """
    given = np.asarray(indices)
    if not 1 <= n <= 1 << 62 or (given.size and (given.min() < 0 or given.max() >= n)):
        raise ValueError(f"indices must be in [0, {n}), and n must be between 1 and 2**62")
    bits = max(2, (n - 1).bit_length())
    images = _feistel(given.astype(np.uint64).ravel(), bits, key)
    outside = np.flatnonzero(images >= n)
    while outside.size:
        images[outside] = _feistel(images[outside], bits, key)
        outside = outside[images[outside] >= n]
    return images.astype(np.int64).reshape(given.shape)
