"""What stops a preparation: a tokenizer that loses text, and sources of which nearly nothing can be used."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.faults import check_faults
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Rules
from megatron_coca.data.readers.source import ReadingProblems
from megatron_coca.data.tokenizers.kinds import Tokenizer
from megatron_coca.data.tokenizers.losses import Sample

EARLY_PASSAGES, EARLY_FACTOR = 64, 5.0
"""So many passages, of which this factor of the limits is lost, stop a preparation before it has read everything."""


def check_tokenizer(name: str, sample: Sample, tokenizer: Tokenizer, rules: Rules, factor: float = 1.0) -> None:
    """`DataError` if a tokenizer loses text of the source `name`, unless the rules accept that."""
    if not rules.accept_tokenizer and (loss := sample.loss(tokenizer.vocab_size, factor)):
        raise DataError(
            f"{name}: the tokenizer ({tokenizer.tokenizer_type}) loses text: {loss}. Use one with byte fallback and "
            "without normalization, and check that its files are complete. To use it nevertheless, set "
            "accept_tokenizer (--accept-tokenizer)."
        )


@dataclass
class _SoFar:
    """What was found in a source so far."""

    documents: int = 0
    problems: ReadingProblems = field(default_factory=ReadingProblems)
    sample: Sample = field(default_factory=Sample)


class Watch:
    """Stops a preparation early if most of what was read cannot be used. The end of a preparation decides the rest."""

    def __init__(self, sources: Sequence[CorpusSource], tokenizer: Tokenizer, rules: Rules) -> None:
        self._sources, self._tokenizer, self._rules = sources, tokenizer, rules
        self._found = [_SoFar() for _ in sources]

    def see(self, number: int, documents: int, problems: ReadingProblems, sample: Sample) -> None:
        """Count a chunk of source `number`. `DataError` if nearly everything so far is faulty or lost."""
        source, found = self._sources[number], self._found[number]
        found.documents += documents
        found.problems.merge(problems)
        found.sample.merge(sample)
        check_faults(source.spec.name, found.documents, found.problems, source.max_faulty, early=True)
        if found.sample.passages >= EARLY_PASSAGES:
            check_tokenizer(source.spec.name, found.sample, self._tokenizer, self._rules, EARLY_FACTOR)
