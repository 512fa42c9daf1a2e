"""Limits on the faulty records of a source. Many faulty records suggest that the files are read in the wrong format."""

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.fields import NAME_IT
from megatron_coca.data.readers.source import NOT_COUNTED, ReadingProblems
from megatron_coca.data.readers.streams import BINARY

FEW, FEW_BYTES = 10, 1 << 16
"""The share of faulty records is limited only if there are more than `FEW` faulty records. Their share of the bytes is
limited only if they have more than `FEW_BYTES` bytes in total. So a bad line in a small file does not stop a
preparation.
"""
EARLY_FAULTS, EARLY_SHARE = 10_000, 0.9
"""A preparation stops early if it finds more than `EARLY_FAULTS` faulty records and their share of the records so far
is above `EARLY_SHARE`.
"""
WITHOUT_ANSWER = "chat without an answer"
"""The kind of fault of a chat in which no token counts in the loss."""
NOT_ENCODED = "text that the tokenizer cannot encode"
"""The kind of fault of a text that the tokenizer cannot encode, such as a text with millions of consecutive spaces."""
_AS_JSON = (
    "write one JSON object per line, as json.dumps does; if the files are plain text, give them the suffix .txt, "
    "before any compression suffix (log.txt.gz)"
)
_NOT_LINES = "not JSON lines"
_CHAT = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
REMEDIES = {
    "invalid JSON": _AS_JSON,
    _NOT_LINES: "write one object per line, as jq -c '.[]' does",
    "not a JSON object": _AS_JSON,
    "missing field": NAME_IT,
    "missing key": "give every record a key, or name another field with `fields: {key: NAME}`",
    "unusable key": "name a field with text, numbers or dates with `fields: {key: NAME}`",
    "missing set": "name the field with `fields: {set: NAME}`",
    "missing messages": (
        "name the field with `fields: {messages: NAME}`, or convert the records, such as prompts with completions, to "
        + _CHAT
    ),
    "text is not a string": NAME_IT,
    "invalid UTF-8": "convert the files to UTF-8",
    BINARY: (
        "leave out binary files, give compressed files their suffix (.gz), and convert text in UTF-16 with "
        "iconv -f UTF-16LE -t UTF-8"
    ),
    "record too long": "increase max_record_mib (--max-record-mib)",
    "chat that cannot be rendered": "check the chat template (chat_template, --chat-template)",
    NOT_ENCODED: "leave out or shorten these texts, or use another tokenizer",
    WITHOUT_ANSWER: "rename the role of the answers to assistant, or train on all tokens with --messages all",
}
"""Remedies by kind of fault."""


def remedy_of(problems: ReadingProblems) -> tuple[str, str]:
    """Return the kind of fault that an error message should name, and its remedy."""
    kind = next((kind for kind, _ in problems.sizes.most_common() if kind not in NOT_COUNTED), "")
    if kind == "invalid JSON" and _NOT_LINES in problems.sizes:
        kind = _NOT_LINES  # the JSON value spans many lines, so its later lines are invalid
    return kind, REMEDIES.get(kind, "correct the files")


def check_faults(name: str, documents: int, problems: ReadingProblems, most: float, early: bool = False) -> None:
    """Raise `DataError` if the share of faulty records in the source `name` is above `most`. Three shares are checked:
    the share of the records, the share of their bytes, and the share of the files that have no usable record.

    `documents` is the number of usable records. Set `early` if the source is not completely read yet. Then only the
    share of the records is checked, and its limit is at least `EARLY_SHARE`.
    """
    records = documents + problems.total + problems.filtered.total()
    shares = (
        (problems.faulty, records, EARLY_FAULTS if early else FEW, "{:,} of {:,} records are faulty"),
        (problems.faulty_bytes, problems.read, FEW_BYTES, "{:,} of {:,} bytes are in faulty records"),
        (problems.lost_files if documents else 0, problems.files, 0, "{:,} of {:,} files have no usable record"),
    )
    limit = max(most, EARLY_SHARE) if early else most
    for faulty, total, few, sentence in shares[:1] if early else shares:
        if faulty > max(few, total * limit):
            kind, remedy = remedy_of(problems)
            example = next((line for line in problems.named if f": {kind}" in line), kind)
            share = min(1.0, max(faulty / max(1, total) for faulty, total, _, _ in shares) + 0.05)
            accepting = (
                f", or accept the faults with max_faulty of the source (--max-faulty {share:.2f})" if documents else ""
            )
            raise DataError(
                f"{name}: {sentence.format(faulty, total)}, which is more than {limit:.0%} (for example {example}); "
                f"{remedy}{accepting}"
            )
