"""Texts, and the bytes of files and archives that hold them."""

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
from collections.abc import Callable

import zstandard

Compress = Callable[[bytes], bytes]
COMPRESS: dict[str, Compress] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
TEXTS = [f"text {i} " + "".join(random.Random(i).choices("abcdefghijklmnop \u00e9\u4e16", k=200)) for i in range(300)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
SKIPPABLE = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"notes"


def tar(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in files.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return stream.getvalue()
