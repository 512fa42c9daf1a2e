"""Render an untrusted Jinja2 template in jinja2's immutable sandbox, within a budget of steps.

The sandbox keeps a template from running Python code and reading files, but a template could still run forever or fill
the memory. Therefore every iteration, call, operation and printed value first takes steps from a budget, in proportion
to its size. Steps are counted, not timed, so that a template stops at the same place on every machine.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache, wraps
from itertools import chain
from string import Formatter
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.visitor
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LONGEST = 1 << 18
"""Maximum number of characters of a template. The longest known templates have a tenth of this number."""
CHARACTERS, ITEMS = 6, 2
"""One step pays for 2^6 characters of text, or for 2^2 items of a list. The constants are the exponents."""
LARGEST_BITS = 4096
"""Maximum number of bits of a computed integer."""
LARGEST_ARGUMENT = 1000
"""Maximum of integer arguments of filters, such as widths and counts."""

METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        (
            *("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition"),
            *("startswith", "endswith", "removeprefix", "removesuffix", "find", "rfind", "index", "rindex", "count"),
            *("upper", "lower", "title", "capitalize", "casefold", "swapcase", "replace", "join", "format"),
            *("format_map", "center", "ljust", "rjust", "zfill", "expandtabs", "isalnum", "isalpha", "isascii"),
            *("isdecimal", "isdigit", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper"),
        )
    ),
    Mapping: frozenset(("get", "items", "keys", "values", "copy")),
    list: frozenset(("index", "count", "copy")),
    tuple: frozenset(("index", "count")),
}
"""The methods that a template may call, by the type of the object."""
CONSTANT = frozenset(("length", "count", "first", "default", "d", "attr"))
"""Filters that do a constant amount of work for arguments of any size."""
SHALLOW = frozenset(
    ("list", "last", "map", "select", "reject", "selectattr", "rejectattr", "items", "reverse", "batch", "slice")
)
"""Filters with an amount of work that depends on the number of items in their arguments, but not on the size of the
items.
"""
ANY_NUMBER = frozenset(["default", "d", "int", "float", "abs", "sum", "min", "max", "truncate"])
"""Filters that accept integers of any size."""
REMOVED = frozenset(["urlize", "wordwrap", "striptags", "pprint", "xmlattr"])
"""Filters that take more than linear time and that no chat template needs."""
DEEP_TESTS = frozenset(
    (
        *("in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<="),
        *("gt", "greaterthan", ">", "ge", ">="),
    )
)
"""Tests that compare their arguments including all nested items."""


class TooManySteps(jinja2.TemplateError):
    """A template has used up its budget."""


_ATOMS = frozenset((int, bool, float, type(None)))


class Budget:
    """The number of steps left, and the weights of the containers seen so far.

    The weight of a container is a lower bound on the number of characters of its text. Repetitions count: a list that
    contains another list twice includes the weight of that list twice.
    """

    def __init__(self, steps: int) -> None:
        self._steps = self._left = steps
        self._weights, self._kept = dict[int, int](), list[Any]()

    @property
    def spent(self) -> int:
        """The number of steps taken so far."""
        return self._steps - self._left

    def spend(self, steps: int) -> None:
        """Take steps. Raises TooManySteps if too few are left."""
        self._left -= steps
        if self._left < 0:
            raise TooManySteps("it takes too many steps")

    def weigh(self, value: Any) -> int:
        """Return the weight of a value. Raises `TemplateError` for a value with a text that is not reproducible, such
        as a function.
        """
        # The first check is faster, and almost all values are of type str.
        if type(value) is str or isinstance(value, (str, bytes)):
            return len(value)
        if value is None or isinstance(value, float | jinja2.Undefined):
            return 1
        if isinstance(value, int):
            return 1 + (value.bit_length() >> 2)
        if isinstance(value, range):
            return 16 * len(value)
        known = self._weights.get(id(value))
        if known is not None:
            return known
        if isinstance(value, Mapping):
            children: Any = chain.from_iterable(value.items())
        elif isinstance(value, list | tuple | set | frozenset | type({}.items()) | type({}.keys()) | type({}.values())):
            children = value
        elif type(value).__str__ is object.__str__ or callable(value) or isinstance(value, Iterator | Namespace):
            raise jinja2.TemplateError(f"it prints a {type(value).__name__}, which looks different in every process")
        else:
            return 1
        self._weights[id(value)] = 1  # for a list that contains itself
        total = 16 + sum(16 + self.weigh(child) for child in children)
        self._weights[id(value)] = total
        self._kept.append(value)  # keeps the object alive, so that no other object gets its id
        return total

    def read(self, value: Any) -> None:
        """Take steps for an operation that reads a value with all nested items."""
        if type(value) is str:
            self.spend(len(value) >> CHARACTERS)
        elif not isinstance(value, Iterator):
            self.spend(self.weigh(value) >> CHARACTERS)

    def pass_over(self, value: Any) -> None:
        """Take steps for an operation that goes over the items of a value without reading them."""
        if type(value) is str or isinstance(value, (str, bytes)):
            self.spend(len(value) >> CHARACTERS)
        elif type(value) not in _ATOMS and isinstance(value, (Mapping, Sequence)):
            self.spend(len(value) >> ITEMS)

    def made(self, value: Any) -> Any:
        """Take steps for a new value, and return the value. An iterator takes steps as its items are requested."""
        if type(value) is str or isinstance(value, (str, bytes)):
            self.spend(len(value) >> CHARACTERS)
        elif isinstance(value, (list, tuple, dict)):
            self.spend((len(value) >> ITEMS) + (self.weigh(value) >> 2 * CHARACTERS))
        elif type(value) not in _ATOMS and isinstance(value, Iterator):
            return self._counted(value)
        return value

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(1)
            yield item

    def fill_in(self, form: str, values: Sequence[Any]) -> None:
        """Take steps for filling in a format string. The fields may repeat values and may have widths."""
        widths = sum(int(run[:12]) for run in re.findall(r"\d+", form))
        widths += sum(abs(value) for value in values if isinstance(value, int))
        places = 1 + form.count("%") + form.count("{")
        self.spend(widths + places * max(map(self.weigh, values), default=1) + len(form) >> CHARACTERS)

    def replace(self, text: str, old: str, new: str) -> None:
        """Take steps for replacing a substring of a text."""
        self.spend(len(text) + text.count(old) * len(new) >> CHARACTERS)

    def join(self, separator: str, items: Any) -> None:
        """Take steps for joining items with separators."""
        self.spend(self.weigh(items) + len(separator) * len(items) >> CHARACTERS)


class _Context(Context):
    """The context for rendering a template, with the budget and the time."""

    budget: Budget
    now: datetime

    def derived(self, locals: dict[str, Any] | None = None) -> "_Context":
        context = super().derived(locals)
        assert isinstance(context, _Context)
        context.budget, context.now = self.budget, self.now
        return context


class _Environment(ImmutableSandboxedEnvironment):
    """A sandboxed environment in which calls and operators take steps."""

    context_class = _Context
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget: Budget = context.budget  # type: ignore[attr-defined]  # the context is a _Context
        if type(left) is str and type(right) is str and operator == "+":
            budget.spend(1 + (len(left) + len(right) >> CHARACTERS))
            return left + right
        budget.spend(1)
        if operator == "%" and isinstance(left, str):
            budget.fill_in(left, right if isinstance(right, tuple) else (right,))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(0, right))
        elif operator == "*" and isinstance(left, int) != isinstance(right, int):
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(repeated, Sequence):
                budget.spend(max(0, times) * len(repeated) >> (CHARACTERS if isinstance(repeated, str) else ITEMS))
        elif not isinstance(left, int | float):
            budget.pass_over(left)
            budget.pass_over(right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int):
            _check_bits(result.bit_length())
        return budget.made(result)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        assert isinstance(__context, _Context)
        budget = __context.budget
        budget.spend(1)
        method = getattr(__obj, "__wrapped__", __obj)  # unwrap the sandboxed str.format
        if isinstance(method, BuiltinMethodType | MethodType):
            args = _checked_arguments(budget, method.__self__, method.__name__, args)
        for value in chain(args, kwargs.values()):
            budget.pass_over(value)
        return budget.made(super().call(__context, __obj, *args, **kwargs))


def _check_bits(bits: int) -> None:
    if bits > LARGEST_BITS:
        raise TooManySteps("it computes a number that is too large")


def _checked_arguments(budget: Budget, owner: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Take steps for a method call. Return the arguments with iterators converted to lists."""
    kind = next((kind for kind in METHODS if isinstance(owner, kind)), None)
    if kind is None and not isinstance(owner, int | float | bytes | range | set | type):
        return args  # a function of jinja2, or a macro
    if kind is None or name not in METHODS[kind]:
        raise jinja2.TemplateError(f"it calls the method {name} of a {type(owner).__name__}, which is not available")
    args = tuple(list(budget.made(value)) if isinstance(value, Iterator) else value for value in args)
    if kind is not str:
        if kind is not Mapping:
            budget.read(owner)
        for value in args:
            budget.read(value)
        return args
    texts = [value for value in args if isinstance(value, str)]
    budget.spend(len(owner) * (1 + max(map(len, texts), default=0)) >> 2 * CHARACTERS)
    if name == "replace" and len(texts) > 1:
        budget.replace(owner, *texts[:2])
    elif name == "join" and args:
        budget.join(owner, args[0])
    elif name in ("format", "format_map"):
        if any("{" in (width or "") for _, _, width, _ in Formatter().parse(owner)):
            raise TooManySteps("it uses a format with a width that is itself a field")
        budget.fill_in(owner, args)
    else:
        tabs = 1 + owner.count("\t") if name == "expandtabs" else 1
        budget.spend(sum(abs(value) for value in args if isinstance(value, int)) * tabs >> CHARACTERS)
    return args


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, int) and abs(value) > LARGEST_ARGUMENT:
        raise TooManySteps(f"it passes a number that is too large to the filter {name}")


def _expanded(budget: Budget, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Take steps for a filter that may return more than it gets. Return the arguments, with an iterator converted to a
    list.
    """
    value, others = args[0], [*args[1:], *kwargs.values()]
    for each in others if name not in ANY_NUMBER else ():
        _check_number(name, each)
    texts = [each for each in others if isinstance(each, str)]
    if name in ("join", "sum"):
        value = list(value)
        budget.join(max(texts, key=len, default=""), value)
        budget.spend(len(value) * budget.weigh(value) >> 2 * CHARACTERS if name == "sum" else 0)
    elif name == "replace" and len(texts) > 1:
        budget.replace(str(value), *texts[:2])
    elif name == "indent":
        width = max([4, *map(len, texts), *(each for each in others if isinstance(each, int))])
        budget.spend(str(value).count("\n") * width >> CHARACTERS)
    elif name == "format":
        budget.fill_in(str(value), others)
    return [value, *args[1:]]


_PASSED: dict[str, Callable[[_Context], tuple[Any, ...]]] = {
    "context": lambda context: (context,),
    "eval_context": lambda context: (context.eval_ctx,),
    "environment": lambda context: (context.environment,),
}
"""The objects that jinja2 passes to filters and tests as an additional first argument, by jinja2's names."""


def _counting(name: str, function: Callable[..., Any], is_filter: bool = True) -> Callable[..., Any]:
    """Wrap a filter or test so that it takes steps for its arguments and its result."""
    walked = Budget.pass_over if name in SHALLOW else Budget.read
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", "")
    given = _PASSED.get(passed, lambda context: ())

    @wraps(function)
    def counted(context: _Context, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        budget.spend(1)
        for value in chain(args, kwargs.values()) if name not in CONSTANT else ():
            walked(budget, value)
        values = _expanded(budget, name, args, kwargs) if is_filter else args
        return budget.made(function(*given(context), *values, **kwargs))

    return jinja2.pass_context(counted)


# Filters around the nodes of a template, which take steps ------------------------------------------------


@jinja2.pass_context
def _printed(context: _Context, value: Any) -> Any:
    """Take steps for a value that is converted to text."""
    context.budget.spend(1 + (context.budget.weigh(value) >> CHARACTERS))
    return value


@jinja2.pass_context
def _compared(context: _Context, value: Any) -> Any:
    budget = context.budget
    budget.spend(1)
    if type(value) is str or isinstance(value, (str, list, tuple, dict)):
        budget.read(value)
    else:
        budget.pass_over(value)
    return value


@jinja2.pass_context
def _built(context: _Context, value: Any) -> Any:
    """Take steps for a new container, or for a slice of a container."""
    context.budget.spend(1)
    return context.budget.made(value)


@jinja2.pass_context
def _stepped(context: _Context, characters: int) -> bool:
    """Take steps for an iteration or call that prints `characters` characters of the template's own text."""
    context.budget.spend(1 + (characters >> CHARACTERS))
    return True


_NODES = {"-printed": _printed, "-compared": _compared, "-built": _built, "-stepped": _stepped}
"""The four filters above, under names that a template cannot spell."""


class _Metering(jinja2.visitor.NodeTransformer):
    """Wraps the nodes of a template in the filters of `_NODES`."""

    def _around(self, name: str, node: Any) -> Any:
        plain = isinstance(node, nodes.Const | nodes.TemplateData)
        return node if plain else nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def _step(self, node: Any) -> Any:
        data = sum(len(each.data) for each in node.find_all(nodes.TemplateData))
        return nodes.Filter(nodes.Const(data), "-stepped", [], [], None, None, lineno=node.lineno)

    def _each(self, node: Any) -> Any:
        """Insert a step at the start of a macro, a call with a body, or a block."""
        step = nodes.ExprStmt(self._step(node), lineno=node.lineno)
        self.generic_visit(node)
        node.body.insert(0, step)
        return node

    visit_Macro = visit_CallBlock = visit_Block = visit_FilterBlock = visit_AssignBlock = _each  # noqa: N815

    def visit_For(self, node: Any) -> Any:  # noqa: N802 - as in jinja2
        step = self._step(node)
        self._each(node)
        if node.test is not None:
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        node.iter = self._around("-built", node.iter)
        return node

    def visit_Output(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [self._around("-printed", each) for each in node.nodes]
        return node

    visit_Concat = visit_Output  # noqa: N815

    def visit_Compare(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        node.expr = self._around("-compared", node.expr)
        for operand in node.ops:
            operand.expr = self._around("-compared", operand.expr)
        return node

    def visit_List(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        items = node.iter_child_nodes()
        stored = isinstance(node, nodes.Tuple) and node.ctx != "load"
        return node if stored or all(isinstance(each, nodes.Const) for each in items) else self._around("-built", node)

    visit_Tuple = visit_Dict = visit_List  # noqa: N815

    def visit_Getitem(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        return self._around("-built", node) if isinstance(node.arg, nodes.Slice) else node


# The environment ------------------------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}`. It passes its text to the function `mark_generation`, if there is one, and prints
    the result.
    """

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        mark = nodes.Name("mark_generation", "load")
        marked = nodes.Filter(None, "marked", [mark], [], None, None)
        return nodes.FilterBlock(body, marked).set_lineno(line)


@jinja2.pass_context
def _tojson(
    context: _Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does. Steps are also taken for the written text, because indentation can make it much
    longer than the value.
    """
    budget = context.budget
    budget.spend(1 + (budget.weigh(value) >> CHARACTERS))
    for size in (indent, budget.weigh(indent), budget.weigh(separators)):
        _check_number("tojson", size)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    parts = [encoder.encode(value)] if indent is None else encoder.iterencode(value)
    return "".join(map(budget.made, parts))


def _raise(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _draw(*_: Any, **__: Any) -> None:
    raise jinja2.TemplateError("it uses random numbers, so its text would differ from run to run")


_PLACES = re.compile(r"%[-_0^#+]*\d*[EO]?(.)", re.DOTALL)
"""Matches a field in a time format. The group is the code of the field."""


@jinja2.pass_context
def _strftime_now(context: _Context, form: str) -> str:
    context.budget.fill_in(form, ())
    if any(place.endswith("s") for place in _PLACES.findall(form)):
        raise jinja2.TemplateError(
            "it prints the time with the field %s, which depends on the time zone of the machine"
        )
    return context.now.strftime(form)


@cache
def compiled(source: str) -> jinja2.Template:
    """Compile a template with the settings, filters and functions that transformers uses. Raises TemplateError if the
    template is invalid.
    """
    if len(source) > LONGEST:
        raise jinja2.TemplateError(f"it has {len(source):,} characters, but at most {LONGEST:,} are allowed")
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    filters: dict[str, Any] = {name: each for name, each in environment.filters.items() if name not in REMOVED}
    filters |= {"marked": lambda text, mark: mark(text) if mark else text, "random": _draw}
    environment.filters = {name: _counting(name, each) for name, each in filters.items()}
    environment.filters |= {**_NODES, "tojson": _tojson, "marked": filters["marked"]}
    tests: dict[str, Any] = environment.tests
    tests |= {name: _counting(name, tests[name], is_filter=False) for name in DEEP_TESTS}
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now, "lipsum": _draw}
    tree = _Metering().visit(environment.parse(source))
    tree.set_environment(environment)
    code = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


def render(source: str, variables: Mapping[str, Any], budget: Budget, now: datetime) -> str:
    """Render a template. Raises TemplateError if rendering fails or the budget is used up. May also raise other errors,
    such as UnicodeEncodeError if the text contains a lone surrogate.
    """
    template = compiled(source)
    context = template.new_context(dict(variables))
    assert isinstance(context, _Context)
    context.budget, context.now = budget, now
    text = "".join(template.root_render_func(context))
    text.encode()
    return text
