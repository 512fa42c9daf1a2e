"""The budget of steps for rendering an untrusted chat template, and the sizes of the values that the template makes.

The size of a value is 1 for each character, and 16 for each item of a container. Items of nested containers count, too.
One step pays for a size of 64. Before an operation computes its result, it pays for an upper bound of the result's
size. No value may be larger than a fixed part of the budget. These rules bound the memory and time of every operation.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import jinja2
from jinja2.utils import Namespace

CHARACTERS, ITEMS = 6, 2
"""One step pays for 2^6 characters of text, or for 2^2 items of a list. The constants are the exponents."""
ITEM = 1 << CHARACTERS - ITEMS
"""The size of an item in addition to the size of its content."""
LARGEST_VALUE = 4
"""No value may have a size above 2^4 times the number of steps of the budget. This is a quarter of the size that these
steps pay for. The constant is the exponent.
"""
LARGEST_BITS = 4096
"""Maximum number of bits of a computed integer."""
LARGEST_ARGUMENT = 1000
"""Maximum absolute value of an integer argument of a filter, such as a width or a count."""
LARGEST_DEPTH = 200
"""Maximum depth of nested containers. Some operations of Python crash if the nesting is too deep."""

_ATOMS = frozenset((int, bool, float, type(None)))
_FIELD = 2 << CHARACTERS
"""The work of filling in one field of a format string, expressed as a size."""
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


class TooManySteps(jinja2.TemplateError):
    """A template has used up its budget."""


class Budget:
    """The number of steps that are left, and the sizes of the containers that were measured.

    Args:
        steps: the number of steps. It is also an attribute.
        each: maximum number of steps for each `part`; by default, `steps`.

    The size of a container includes the sizes of all its items. If a list contains another list twice, it includes the
    size of that list twice.
    """

    def __init__(self, steps: int, each: int | None = None) -> None:
        self.steps = self._left = steps
        self._each = steps if each is None else each
        self._sizes, self._kept = dict[int, tuple[int, int]](), list[Any]()
        self._whole: Budget | None = None

    def part(self) -> "Budget":
        """Return a budget for one of several renderings. Steps taken from the returned budget are also taken from this
        budget.
        """
        part = Budget(min(self._left, self._each))
        part._whole = self
        return part

    @property
    def spent(self) -> int:
        """The number of steps taken so far."""
        return self.steps - self._left

    def spend(self, steps: int) -> None:
        """Take steps. Raises TooManySteps if too few are left."""
        self._left -= steps
        if self._whole is not None:
            self._whole._left -= steps
        if self._left < 0:
            raise TooManySteps("it takes too many steps")

    def pay(self, size: int) -> None:
        """Take the steps for a value of this size before the value is made. Raises TooManySteps if the value is too
        large.
        """
        self.spend(size >> CHARACTERS)
        if size > self.steps << LARGEST_VALUE:
            raise TooManySteps("it makes a value that takes too many steps")

    def weigh(self, value: Any) -> int:
        """Return the size of a value. Raises `TemplateError` for a value, such as a function, if its text would differ
        between processes.
        """
        return self._measured(value)[0]

    def _measured(self, value: Any) -> tuple[int, int]:
        """Return (size, depth of nested containers)."""
        # The first check is faster, and almost all values are of type str.
        if type(value) is str or isinstance(value, (str, bytes)):
            return len(value), 0
        if isinstance(value, float):
            return 16, 0
        if value is None or isinstance(value, jinja2.Undefined):
            return 1, 0
        if isinstance(value, int):
            return 1 + (value.bit_length() >> 2), 0
        if isinstance(value, range):
            return ITEM * len(value), 1
        known = self._sizes.get(id(value))
        if known is not None:
            return known
        if isinstance(value, Mapping):
            children: Any = chain.from_iterable(value.items())
        elif isinstance(value, list | tuple | set | frozenset | type({}.items()) | type({}.keys()) | type({}.values())):
            children = value
        elif type(value).__str__ is object.__str__ or callable(value) or isinstance(value, Iterator | Namespace):
            raise jinja2.TemplateError(f"it prints a {type(value).__name__}, which looks different in every process")
        else:
            return 1, 0
        self.spend(len(value) >> ITEMS)
        self._sizes[id(value)] = 1, 0  # for a list that contains itself
        measured = [self._measured(child) for child in children]
        size = ITEM + sum(ITEM + size for size, _ in measured)
        depth = 1 + max((depth for _, depth in measured), default=0)
        if depth > LARGEST_DEPTH:
            raise TooManySteps(f"it nests lists or mappings deeper than {LARGEST_DEPTH} levels")
        self._sizes[id(value)] = size, depth
        self._kept.append(value)  # keeps the object alive, so that no other object gets its id
        return size, depth

    def read(self, value: Any) -> None:
        """Take steps for an operation that reads a value with all nested items."""
        if type(value) is str:
            self.spend(len(value) >> CHARACTERS)
        elif not isinstance(value, Iterator):
            self.spend(self.weigh(value) >> CHARACTERS)

    def pass_over(self, value: Any) -> None:
        """Take steps for an operation that visits the items of a value but does not read their content."""
        if type(value) is str or isinstance(value, (str, bytes)):
            self.spend(len(value) >> CHARACTERS)
        elif type(value) not in _ATOMS and isinstance(value, Collection):
            self.spend(len(value) >> ITEMS)

    def list_items(self, value: Any) -> None:
        """Take steps for an operation that makes a list of the items of a value, such as the characters of a text."""
        if type(value) not in _ATOMS and isinstance(value, Collection):
            self.pay(ITEM * len(value))

    def made(self, value: Any) -> Any:
        """Take steps for a new value, and return the value. An iterator takes steps as its items are requested. Raises
        TooManySteps if the value is too large.
        """
        if type(value) is str or isinstance(value, (str, bytes)):
            self.pay(len(value))
        elif isinstance(value, int):
            check_bits(value.bit_length())
        elif type(value) not in _ATOMS and isinstance(value, Iterator):
            return self._counted(value)
        elif isinstance(value, (Sequence, Mapping, set, frozenset)) and not isinstance(value, range):
            size = self.weigh(value)
            self.spend(size >> 2 * CHARACTERS)
            if size > self.steps << LARGEST_VALUE:
                raise TooManySteps("it makes a value that takes too many steps")
        return value

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(1)
            yield item


def check_bits(bits: int) -> None:
    """Raise TooManySteps for a computed integer with too many bits."""
    if bits > LARGEST_BITS:
        raise TooManySteps("it computes a number that is too large")


# Upper bounds of results -----------------------------------------------------------------------------------------


def filled_in(budget: Budget, form: str, values: Sequence[Any]) -> int:
    """Return an upper bound of the size of a filled-in format string. Fields may repeat values and may have widths."""
    widths = sum(int(run[:12]) for run in re.findall(r"\d+", form))
    if "*" in form:  # '%*d' takes a width from the values
        widths += sum(abs(value) for value in values if isinstance(value, int))
    fields = form.count("%") + form.count("{")
    return widths + fields * (_FIELD + max(map(budget.weigh, values), default=0)) + len(form)


def _padded(_: Budget, text: str, values: Sequence[Any]) -> int:
    columns = sum(abs(value) for value in values if isinstance(value, int))
    return columns * (1 + text.count("\t")) + len(text)


def _joined(budget: Budget, text: str, values: Sequence[Any]) -> int:
    return sum(budget.weigh(value) + (ITEM + len(text)) * len(value) for value in values)


def _replaced(_: Budget, text: str, values: Sequence[Any]) -> int:
    old, new = [value for value in values if isinstance(value, str)][:2]
    return len(text) + text.count(old) * len(new)


def _split(_: Budget, text: str, values: Sequence[Any]) -> int:
    separator = next((value for value in values if isinstance(value, str) and value), None)
    return ITEM * (len(text) // 2 if separator is None else text.count(separator))


def _lines(_: Budget, text: str, __: Sequence[Any]) -> int:
    return ITEM * count_lines(text)


def count_lines(text: str) -> int:
    """Return an upper bound of the number of lines of a text."""
    return 1 + sum(map(text.count, _LINE_ENDS))


GROWING: dict[str, Callable[[Budget, str, Sequence[Any]], int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs"), _padded),
    **dict.fromkeys(("format", "format_map"), filled_in),
    **dict.fromkeys(("split", "rsplit"), _split),
    "splitlines": _lines,
    "join": _joined,
    "replace": _replaced,
}
"""The methods of texts that may return much larger values than the text and the arguments. Maps each method to a
function (budget, text, arguments) that returns an upper bound of the size of the result. The result of any other method
is at most a few times as large as the text.
"""
