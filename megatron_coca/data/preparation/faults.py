"""How many records of a source may be faulty: many faults mean that its files are not of the type they are read as."""

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.fields import NAME_IT
from megatron_coca.data.readers.source import ReadingProblems

FEW = 10
"""Faulty records that are always accepted, so that one bad line of a small file does not stop a preparation."""
NOT_COUNTED = frozenset({"empty text"})
"""Faults that say nothing about the type of a file: tables of paragraphs have many empty rows."""
EARLY_FAULTS, EARLY_SHARE = 10_000, 0.9
"""So many faulty records, and such a share of those read so far, stop a preparation before it has read everything."""
_AS_JSON = (
    "The files are read as JSON lines because of their names; give a file of text the ending .txt, before that of its "
    "compression (log.txt.gz)."
)
REMEDIES = {
    "invalid JSON": _AS_JSON,
    "not JSON lines": "Write one object per line, as jq -c '.[]' does.",
    "not a JSON object": _AS_JSON,
    "missing field": NAME_IT,
    "text is not a string": NAME_IT,
    "invalid UTF-8": "Convert the files to UTF-8.",
    "record too long": "Raise max_record_mib (--max-record-mib).",
    "chat that cannot be rendered": "Check the chat template (chat_template, --chat-template).",
}
"""What to do about faults, by their kind."""


def check_faults(name: str, documents: int, problems: ReadingProblems, most: float, early: bool = False) -> None:
    """`DataError` if more than the share `most` of the records of source `name` is faulty.

    `documents` counts the usable records. With `early`, before all is read, nearly all so far must be faulty.
    """
    faulty = sum(count for kind, count in problems.counts.items() if kind not in NOT_COUNTED)
    records = documents + problems.total + problems.filtered.total()
    if faulty <= (EARLY_FAULTS if early else FEW) or faulty <= records * (max(most, EARLY_SHARE) if early else most):
        return
    kind = next(kind for kind, _ in problems.counts.most_common() if kind not in NOT_COUNTED)
    example = next((line for line in problems.named if f": {kind}" in line), kind)
    share = min(1.0, faulty / records + 0.05)
    accepting = f" To accept the faults, set max_faulty of the source (--max-faulty {share:.2f})." if documents else ""
    raise DataError(
        f"{name}: {faulty:,} of {records:,} records are faulty; at most {most:.0%} may be. For example {example}. "
        f"{REMEDIES.get(kind, 'Correct the files.')}{accepting}"
    )
