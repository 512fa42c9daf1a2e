"""Documents whose text went through a wrong decoding, or holds what no text holds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_coca.data.inspection.collection import ShardEntry, some_documents
from megatron_coca.data.shards import read_header
from megatron_coca.data.tokenizers.kinds import Tokenizer
from megatron_coca.tables import excerpt, percent, table

# Bytes 0x80 to 0xBF as Latin-1 and as Windows-1252 read them: what follows the first byte of a character in UTF-8.
_FOLLOWING = "".join({chr(b) for b in range(0x80, 0xC0)} | set(bytes(range(0x80, 0xC0)).decode("cp1252", "ignore")))
FAULTS = {
    "U+FFFD": re.compile("\ufffd"),
    "control characters": re.compile("[\x00-\x08\x0e-\x1f\x7f\x80-\x84\x86-\x9f]"),
    # The most frequent ones: accented letters, punctuation of U+2000 to U+203F, U+FFFD and the byte order mark.
    "mojibake": re.compile(f"[ÂÃ][{_FOLLOWING}]|â(?:€|\x80)[{_FOLLOWING}]|ï¿½|ï»¿"),
}
"""What is looked for. White space, form feeds and U+0085 are no faults."""
EXAMPLES = 5
_AROUND = 30


@dataclass
class TextFaults:
    """What was found in one shard.

    Attributes:
        documents: in the shard.
        examined: of these, decoded.
        with_fault: documents by fault.
        occurrences: by fault.
        examples: (document, fault, excerpt), some of each fault.
    """

    label: str
    documents: int
    examined: int = 0
    with_fault: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))
    occurrences: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))
    examples: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, number: int, text: str) -> None:
        """Look at the text of document ``number``."""
        self.examined += 1
        for fault, pattern in FAULTS.items():
            places = [match.start() for match in pattern.finditer(text)]
            if places:
                self.with_fault[fault] += 1
                self.occurrences[fault] += len(places)
                if self.with_fault[fault] <= EXAMPLES:
                    around = text[max(0, places[0] - _AROUND) : places[0] + _AROUND]
                    self.examples.append((number, fault, excerpt(around, 6 * _AROUND)))

    def facts(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return dict(vars(self))


def find_text_faults(
    entries: Sequence[ShardEntry], tokenizer: Tokenizer, count: int | None = None, show: bool = False
) -> list[TextFaults]:
    """Decode the documents of each shard, or ``count`` of them spread evenly, and look for faults.

    Raises ``DataError`` for a damaged shard and for ids that the tokenizer does not have.
    """
    found = []
    for entry in entries:
        faults = TextFaults(entry.label, read_header(entry.prefix).entries - 1)
        total = faults.documents if count is None else min(count, faults.documents)
        chosen = some_documents(entry.prefix, count)
        for number, tokens in tqdm(chosen, f"decode {entry.label}", total, unit=" documents", disable=not show):
            faults.add(number, tokenizer.decode(np.asarray(tokens).tolist()))
        found.append(faults)
    return found


def text_faults_table(found: Sequence[TextFaults]) -> str:
    """Documents with each fault by shard, then examples."""
    rows = [[f.label, f.documents, f.examined, *(_count(n, f.examined) for n in f.with_fault.values())] for f in found]
    examples = [f"{f.label}:{number}  {fault}: {text}" for f in found for number, fault, text in f.examples]
    return "\n".join([table(["shard", "documents", "examined", *FAULTS], rows), "", *examples]).rstrip()


def _count(documents: int, examined: int) -> str:
    return f"{documents:,} ({percent(documents / max(1, examined))})"
