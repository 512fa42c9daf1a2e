"""The stages of a run with their data, and the values that must not change when a run is resumed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_coca.config import BatchSizes, Config, ConfigError, RunStage
from megatron_coca.data import DataError, Samples
from megatron_coca.training.corpus import Corpus, open_corpus
from megatron_coca.training.topology import Topology


class OpenedStage(NamedTuple):
    """A stage, its data, its batch sizes and, if the run has stages, a JSON record of every stage up to this one."""

    stage: RunStage[Config]
    corpus: Corpus
    sizes: BatchSizes
    records: tuple[dict[str, Any], ...]

    @property
    def shared(self) -> dict[str, Any]:
        """Entries of meta.json, in addition to the configuration, that must not change when a run is resumed."""
        own = {"batch": self.sizes.total, "dtype": self.stage.config.precision.dtype}
        return own | ({"stages": list(self.records)} if self.records else {})


def open_stages(config: Config, topology: Topology) -> list[OpenedStage]:
    """Open the data of all stages, so that missing data of a later stage is reported at the start.

    A stage with the same sources, weights and sequence length as the previous stage continues in the same data order.
    Any other stage starts, in each source, after the tokens that the run has already read.

    Raises:
        ConfigError, DataError: see `open_corpus`; or the stages have different tokenizers (DataError).
    """
    opened: list[OpenedStage] = []
    for number, stage in enumerate(config.run_stages()):
        name = f"stages[{number}]: " if config.schedule.stages else ""
        try:
            corpus, sizes = open_corpus(stage.config), stage.config.batch.resolve(topology.data)
        except (ConfigError, DataError) as error:
            raise type(error)(f"{name}{error}") from error
        if opened:
            before, previous = opened[-1], opened[-1].corpus
            if _vocabulary(corpus) != _vocabulary(previous):
                raise DataError(
                    f"{name}the data has a different tokenizer or vocabulary than in the previous stage; prepare the "
                    "data of all stages with the same tokenizer"
                )
            sample = previous.start[1] + (stage.first - previous.start[0]) * before.sizes.total
            if _order(corpus.train) == _order(previous.train):
                first, earlier = previous.train.first, previous.earlier
            else:
                first, earlier = sample, tuple(previous.mixture(stage.first, before.sizes.total))
            train = corpus.train.after(first, {share.source: share.tokens for share in earlier})
            corpus = replace(corpus, train=train, start=(stage.first, sample), earlier=earlier)
        record = {
            "last": stage.last,
            "tokens_per_step": sizes.total * stage.config.model.seq_length,
            "changes": dict(stage.changes),
            "read": {share.source: share.tokens for share in corpus.mixture(stage.last, sizes.total)},
        }
        records = (*(opened[-1].records if opened else ()), record) if config.schedule.stages else ()
        opened.append(OpenedStage(stage, corpus, sizes, records))
    return opened


def _vocabulary(corpus: Corpus) -> tuple[int | None, str | None]:
    return corpus.config.model.vocab_size, corpus.tokenizer.fingerprint if corpus.tokenizer else None


def _order(samples: Samples) -> tuple[Any, ...]:
    """Return the values that, together with the run's seed, determine the order of the samples."""
    return samples.seq_length, samples.weights, [(str(shard.prefix), shard.len_tokens) for shard in samples.shards]


def differing_stages(saved: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how the finished stages in `wanted` differ from those in `saved`. The last stage of both lists contains
    the saved step. It is not compared, because it may change.
    """
    if max(1, len(saved)) != max(1, len(wanted)):
        return [
            f"list of stages (the step was in stage {max(1, len(saved))}, but is now in stage {max(1, len(wanted))})"
        ]
    problems = []
    for number, (old, new) in enumerate(zip(saved[:-1], wanted[:-1], strict=True)):
        changed = [f"{key} (saved {old.get(key)!r}, now {new[key]!r})" for key in new if old.get(key) != new[key]]
        problems += [f"{line} in the finished stages[{number}]" for line in changed]
    return problems
