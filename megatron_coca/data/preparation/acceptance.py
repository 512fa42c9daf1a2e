"""Checks that stop a preparation if the tokenizer loses text or if almost nothing of a source is usable."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.faults import check_faults
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Rules
from megatron_coca.data.readers.source import ReadingProblems
from megatron_coca.data.tokenizers.kinds import Tokenizer
from megatron_coca.data.tokenizers.losses import Sample

EARLY_PASSAGES, EARLY_FACTOR = 64, 5.0
"""The tokenizer's losses are checked early, once `EARLY_PASSAGES` passages of a source were sampled. In this check, the
limits of lost passages and unknown tokens are multiplied by `EARLY_FACTOR`.
"""


def check_tokenizer(name: str, sample: Sample, tokenizer: Tokenizer, rules: Rules, factor: float = 1.0) -> None:
    """Raise `DataError` if a tokenizer loses text of the source `name`, unless the rules accept the loss. `factor` is
    an argument of `Sample.loss`.
    """
    if not rules.accept_tokenizer and (loss := sample.loss(tokenizer.vocab_size, factor)):
        raise DataError(
            f"{name}: the tokenizer ({tokenizer.tokenizer_type}) loses text: {loss}; use a tokenizer with byte "
            "fallback and without normalization, check that its files are complete, or accept the loss with "
            "accept_tokenizer (--accept-tokenizer)"
        )


@dataclass
class _SoFar:
    """The counts for a source so far."""

    documents: int = 0
    problems: ReadingProblems = field(default_factory=ReadingProblems)
    sample: Sample = field(default_factory=Sample)


class Watch:
    """Stops a preparation early if almost all records of a source so far are faulty, or if the tokenizer loses far too
    much of its text. Smaller losses stop the preparation only at the end.
    """

    def __init__(self, sources: Sequence[CorpusSource], tokenizer: Tokenizer, rules: Rules) -> None:
        self._sources, self._tokenizer, self._rules = sources, tokenizer, rules
        self._found = [_SoFar() for _ in sources]

    def see(self, number: int, documents: int, problems: ReadingProblems, sample: Sample) -> None:
        """Add the counts of a chunk to the counts of source `number`. Raises `DataError` if almost all records of this
        source so far are faulty, or if the tokenizer loses far too much of its text.
        """
        source, found = self._sources[number], self._found[number]
        found.documents += documents
        found.problems.merge(problems)
        found.sample.merge(sample)
        check_faults(source.spec.name, found.documents, found.problems, source.max_faulty, early=True)
        if found.sample.passages >= EARLY_PASSAGES:
            check_tokenizer(source.spec.name, found.sample, self._tokenizer, self._rules, EARLY_FACTOR)
