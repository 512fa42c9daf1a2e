"""Which training data a run leaves out: the order of samples is a function of the step, so a shift of it is enough."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self


class Gap(NamedTuple):
    """Places in the order of the training data, in steps, that are never read: `begin`, ..., `begin + steps - 1`."""

    begin: int
    steps: int

    @property
    def end(self) -> int:
        """The first place after it."""
        return self.begin + self.steps


@dataclass(frozen=True)
class DataSkips:
    """The places that a run leaves out, and the place that each of its steps reads instead.

    A place is the samples that a step of this number would read if nothing were left out. Steps read the places that
    remain, in order: none twice, none that is left out.

    Attributes:
        gaps: what is left out, ascending and apart from each other.
    """

    gaps: tuple[Gap, ...] = ()

    def position(self, step: int) -> int:
        """The place that step number `step` (the first is 0) reads."""
        place = step
        for gap in self.gaps:
            if gap.begin > place:
                break
            place += gap.steps
        return place

    def skip(self, first: int, last: int) -> Self:
        """Leave out what the steps `first` to `last`, both included, read until now."""
        begin, end = self.position(first), self.position(last) + 1
        # Older gaps lie between the steps' places or apart from them, and never overlap the new one's ends.
        kept = [gap for gap in self.gaps if gap.end < begin or gap.begin > end]
        touching = [gap for gap in self.gaps if gap not in kept]
        begin, end = min([begin, *(g.begin for g in touching)]), max([end, *(g.end for g in touching)])
        return type(self)(tuple(sorted([*kept, Gap(begin, end - begin)])))

    def after_rollback(self, checkpoint: int, first_bad: int, last_bad: int, margin: int) -> Self:
        """What to leave out once the run is back at `checkpoint` completed steps because of `first_bad` to `last_bad`.

        PaLM (Chowdhery et al. 2022, section 5.1) restarts about 100 steps before a spike and leaves out the data seen
        before and during it: the same steps on the same data would lead to the same weights before the spike again.

        Args:
            checkpoint: completed steps of the checkpoint, at most `first_bad`.
            margin: steps before `first_bad` whose data are left out too, as far back as the checkpoint.
        """
        return self.skip(max(checkpoint, first_bad - margin), last_bad)

    def state(self) -> list[list[int]]:
        """The gaps as [begin, steps], for JSON."""
        return [list(gap) for gap in self.gaps]

    @classmethod
    def restore(cls, state: Sequence[Sequence[int]]) -> Self:
        """What `state` has given."""
        return cls(tuple(Gap(*gap) for gap in state))
