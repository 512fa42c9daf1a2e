"""Limits on the faulty records of a source. Many faulty records suggest that the files are read in the wrong format."""

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.fields import NAME_IT
from megatron_coca.data.readers.source import ReadingProblems

FEW = 10
"""Up to this many faulty records are always accepted, so that a bad line in a small file does not stop a preparation.
"""
NOT_COUNTED = frozenset({"empty text"})
"""Kinds of faults that do not count, because they do not suggest a wrong format. Tables of paragraphs have many empty
rows.
"""
EARLY_FAULTS, EARLY_SHARE = 10_000, 0.9
"""A preparation stops early if it finds more than `EARLY_FAULTS` faulty records and their share of the records so far
is above `EARLY_SHARE`.
"""
_AS_JSON = "if the files are plain text, give them the suffix .txt, before any compression suffix (log.txt.gz)"
REMEDIES = {
    "invalid JSON": _AS_JSON,
    "not JSON lines": "write one object per line, as jq -c '.[]' does",
    "not a JSON object": _AS_JSON,
    "missing field": NAME_IT,
    "text is not a string": NAME_IT,
    "invalid UTF-8": "convert the files to UTF-8",
    "record too long": "increase max_record_mib (--max-record-mib)",
    "chat that cannot be rendered": "check the chat template (chat_template, --chat-template)",
}
"""Remedies by kind of fault."""


def check_faults(name: str, documents: int, problems: ReadingProblems, most: float, early: bool = False) -> None:
    """Raise `DataError` if the share of faulty records in the source `name` is above `most`.

    `documents` is the number of usable records. Set `early` if the source is not completely read yet; the limit is then
    much higher (see `EARLY_SHARE`).
    """
    faulty = sum(count for kind, count in problems.counts.items() if kind not in NOT_COUNTED)
    records = documents + problems.total + problems.filtered.total()
    if faulty <= (EARLY_FAULTS if early else FEW) or faulty <= records * (max(most, EARLY_SHARE) if early else most):
        return
    kind = next(kind for kind, _ in problems.counts.most_common() if kind not in NOT_COUNTED)
    example = next((line for line in problems.named if f": {kind}" in line), kind)
    share = min(1.0, faulty / records + 0.05)
    accepting = f", or accept the faults with max_faulty of the source (--max-faulty {share:.2f})" if documents else ""
    raise DataError(
        f"{name}: {faulty:,} of {records:,} records are faulty, which is more than {most:.0%} (for example "
        f"{example}); {REMEDIES.get(kind, 'correct the files')}{accepting}"
    )
