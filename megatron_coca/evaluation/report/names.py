"""Short explanations of position methods, for readers of a report who do not know the names of the methods."""

from collections.abc import Iterable

from megatron_coca.evaluation.labels import in_sentence
from megatron_coca.evaluation.report.plots.looks import Member
from megatron_coca.methods import TABLES

AS_TRAINED = ("as trained", "no change at evaluation")


def explained(members: Iterable[Member], sentence: str = "") -> tuple[tuple[str, str], ...]:
    """Return pairs of names and their explanation. Models or variants with the same methods share one pair.

    The pair has the name of the first of these models or variants. It also has the name of every other one with a
    label in `sentence`.
    """
    found: dict[str, list[str]] = {}
    changed = False
    for member in sorted(members, key=lambda member: bool(member.variant)):
        choices = [TABLES[key].get(name) for key, name in member.methods]
        meanings = [choice.meaning if choice is not None else "" for choice in choices]
        if meanings and all(meanings):
            name, names = member.variant or member.base, found.setdefault("; ".join(meanings), [])
            if not names or (name not in names and in_sentence(member.label) in sentence):
                names.append(name)
        changed = changed or bool(member.variant)
    listed = ((" and ".join(map(in_sentence, names)), meaning) for meaning, names in found.items())
    return tuple(listed) + ((AS_TRAINED,) if changed else ())
