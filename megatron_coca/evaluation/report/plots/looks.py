"""The look of each position method in plots, and the models and variants to which labels belong.

A method has the same colour, marker and dashes in every plot of every page.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

from megatron_coca.evaluation.results import Result

Dashes = tuple[float, ...]
SOLID: Dashes = ()
DASHES: tuple[Dashes, ...] = (SOLID, (5, 1.5), (1.2, 1.2), (5, 1.5, 1.2, 1.5))
MARKERS = "osD^vP*X"


@dataclass(frozen=True)
class Look:
    """Colour, marker and dashes of a line. Lines stay distinguishable without their colour."""

    colour: str
    marker: str
    dashes: Dashes = SOLID


BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PINK, SKY, BLACK, PURPLE, BROWN = "#CC79A7", "#56B4E9", "#222222", "#5B3A9B", "#8A6D3B"
"""The palette of Okabe and Ito (jfly.uni-koeln.de/color), with purple and brown instead of yellow."""
LOOKS = {
    "rotary": Look(BLUE, "o"),
    "coca": Look(RED, "s"),
    "coca_strict": Look(PINK, "D"),
    "alibi": Look(GREEN, "^"),
    "xpos": Look(SKY, "v"),
    "kerple_log": Look(BROWN, "P"),
    "none": Look(PURPLE, "X"),
    "linear": Look(BROWN, "v", DASHES[1]),
    "ntk": Look(ORANGE, "s", DASHES[1]),
    "dynamic": Look(ORANGE, "s", DASHES[1]),
    "yarn": Look(SKY, "D", DASHES[2]),
    "dynamic_yarn": Look(SKY, "D", DASHES[2]),
    "rerope": Look(BLACK, "^", DASHES[3]),
    "leaky_rerope": Look(BLACK, "v", DASHES[2]),
    "log_n": Look(PURPLE, "P", DASHES[2]),
}
"""The looks of common methods, by their names in a configuration."""
COLOURS = (BLUE, RED, GREEN, PINK, ORANGE, SKY, PURPLE, BROWN, BLACK)
"""Colours of other lines. A method's name determines its colour; lines that are not methods use them in order."""


def look_of(method: str) -> Look:
    """Return the look of a method. A method without a row in LOOKS has a look that depends only on its name."""
    digest = crc32(method.encode())
    return LOOKS.get(method) or numbered(digest % (len(COLOURS) * len(MARKERS) * len(DASHES)))


def numbered(index: int) -> Look:
    """Return the look of a line that is not a method. Any 72 consecutive indices have different looks."""
    turn = index // len(COLOURS)
    return Look(COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)], DASHES[turn % len(DASHES)])


CHANGES = (("relative_positions", "type"), ("rope_scaling", "rope_type"), ("logit_scaling", "type"))
"""Keys that evaluation may change, each with the option that names the method. The key that changes a
method most is first."""


def method_of(result: Result) -> str:
    """Return the method that distinguishes a label: the one that evaluation changes or, without a change, `pos_emb`."""
    for key, option in CHANGES:
        value: Any = result.overrides.get(key)
        if name := value.get(option) if isinstance(value, Mapping) else value:
            return str(name)
    return result.checkpoint.pos_emb


KEYS = ("pos_emb", "rotary_frequencies", "rope_scaling", "relative_positions", "logit_scaling", "forgetting_gate")
NO_CHANGE = {("rope_scaling", "default"), ("logit_scaling", "none")}


def methods_of(result: Result, changed: bool) -> tuple[tuple[str, str], ...]:
    """Return the keys and names of the methods in training or, if `changed`, only of those that evaluation changes."""
    trained = {"pos_emb": result.checkpoint.pos_emb, **result.checkpoint.trained_with}
    settings: Mapping[str, Any] = result.overrides if changed else trained
    found = ((key, _name(settings[key])) for key in KEYS if settings.get(key))
    return tuple(each for each in found if each not in NO_CHANGE)


def _name(value: Any) -> str:
    return str(value.get("rope_type") or value.get("type") if isinstance(value, Mapping) else value)


@dataclass(frozen=True)
class Member:
    """A label, split into the label of its weights as trained (`base`) and the name of its `variant`.

    The variant is empty for the weights as trained. `method` is the member's method, named as in a configuration.
    `methods` are the keys and names of all methods in training or, for a variant, of those that evaluation changes.
    """

    label: str
    base: str
    variant: str
    look: Look
    method: str = ""
    methods: tuple[tuple[str, str], ...] = ()

    @property
    def short(self) -> str:
        """The name of the member's line in the panel of its base."""
        return self.variant or "as trained"


def members(results: Iterable[Result]) -> dict[str, Member]:
    """Return the members of a report by label, in the order of the results.

    Labels of the same weights are variants of one base. Two members of a base never look the same. The labels of
    `speed` name shapes of models, so they are left out.
    """
    groups: list[dict[str, Result]] = []
    known: dict[str, dict[str, Result]] = {}
    for result in (each for each in results if each.task != "speed"):
        identity = result.checkpoint.identity
        group = known.get(identity) or next((each for each in groups if result.label in each), None)
        if group is None:
            groups.append(group := {})
        known[identity] = group
        if not group.get(result.label):
            group[result.label] = result
    families = [_family(group) for group in groups]
    by_label = {member.label: member for family in families for member in apart(family)}
    return {label: by_label[label] for group in groups for label in group}


def _family(group: Mapping[str, Result]) -> list[Member]:
    """Return the members of one group, the base first."""
    plain = [label for label, result in group.items() if not any(result.overrides.get(key) for key, _ in CHANGES)]
    base = min(plain or group, key=len)
    made = [
        Member(
            label,
            base,
            "" if label == base else _variant(label, base),
            look_of(method_of(result)),
            method_of(result),
            methods_of(result, label != base),
        )
        for label, result in group.items()
    ]
    return sorted(made, key=lambda member: member.label != base)


def _variant(label: str, base: str) -> str:
    return label.removeprefix(base).strip(" +,:;-") or label


def apart(found: Sequence[Member]) -> list[Member]:
    """Return the members with different looks. A repeated look keeps its colour, but its dashes and marker change."""
    taken: set[Look] = set()
    wanted = {member.look for member in found}
    kept = []
    for member in found:
        look, turn = member.look, 0
        avoided = taken | wanted if look in taken else set()
        while look in avoided and turn < len(DASHES) * len(MARKERS):
            turn += 1
            marker = MARKERS[(MARKERS.index(member.look.marker) + turn) % len(MARKERS)]
            dashes = DASHES[(DASHES.index(member.look.dashes) + turn + turn // len(MARKERS)) % len(DASHES)]
            look = Look(member.look.colour, marker, dashes)
        taken.add(look)
        kept.append(replace(member, look=look))
    return kept


def recoloured(found: Sequence[Member]) -> list[Member]:
    """Return the members of one plot, each with a different colour as long as there are enough colours.

    Their markers and dashes also differ. The first member with a colour keeps it. Methods in LOOKS come first, so that
    they look the same in all plots.
    """
    own: dict[str, str] = {}
    by_rank = sorted(found, key=lambda member: member.method not in LOOKS)
    for member in by_rank:
        if member.look.colour not in own.values():
            own[member.label] = member.look.colour
    free = (colour for colour in COLOURS if colour not in own.values())
    colours = {member.label: own.get(member.label) or next(free, member.look.colour) for member in found}
    apart_in_black = apart([replace(member, look=replace(member.look, colour="")) for member in by_rank])
    shapes = {member.label: member.look for member in apart_in_black}
    looks = {label: replace(shapes[label], colour=colour) for label, colour in colours.items()}
    return [replace(member, look=looks[member.label]) for member in found]
