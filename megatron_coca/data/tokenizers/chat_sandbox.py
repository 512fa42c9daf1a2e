"""Render an untrusted Jinja2 template in jinja2's immutable sandbox, within a budget of steps.

The sandbox keeps a template from running Python code and reading files, but a template could still run forever or fill
the memory. Therefore each iteration, call, operation and printed value costs steps in proportion to its size. The steps
are taken from a budget before anything is computed. The budget limits steps and not time, so that a template stops at
the same place on every machine.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

from megatron_coca.data.tokenizers.chat_budget import (
    CHARACTERS,
    GROWING,
    ITEM,
    LARGEST_ARGUMENT,
    Budget,
    TooManySteps,
    check_bits,
    count_lines,
    filled_in,
)
from megatron_coca.data.tokenizers.chat_values import is_none

__all__ = ["Budget", "TooManySteps", "compiled", "render"]

LONGEST = 1 << 18
"""Maximum number of characters of a template. The longest known templates have a tenth of this number."""
MOST_NODES = 1 << 14
"""Maximum number of nodes of a parsed template, which bounds the time for compiling it."""
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
"""Filters whose work depends on the number of items in their arguments, but not on the size of the items."""
LISTING = SHALLOW | {"sort", "groupby", "join", "sum", "unique", "min", "max", "title", "wordcount", "urlencode"}
"""Filters that make a list of the items of their first argument, or of the characters or words of a text."""
ATTRIBUTES = {"selectattr": 0, "rejectattr": 0, "sum": 0, "groupby": 0, "min": 1, "max": 1, "unique": 1, "join": 1} | {
    "sort": 2,
    "map": None,
}
"""Filters that look up an attribute of each item. Maps each filter to the index of the argument that names the
attribute. The first argument of the filter is not counted. The index is None if the argument can only be passed by
keyword.
"""
LONGEST_ATTRIBUTE = 64
"""Maximum number of characters in the name of an attribute that a filter looks up. Each dot in it adds a look-up."""
LOOK_UP = 16
"""Steps for looking up an attribute of one item. The sandbox checks every look-up."""
ANY_NUMBER = frozenset(["default", "d", "int", "float", "abs", "sum", "min", "max", "truncate"])
"""Filters that accept integers of any size."""
REMOVED = frozenset(["urlize", "wordwrap", "striptags", "pprint", "xmlattr"])
"""Filters that take more than linear time and that no chat template needs."""
CONSTANT_TESTS = frozenset(
    (
        *("defined", "undefined", "none", "boolean", "true", "false", "integer", "float", "number", "string"),
        *("mapping", "sequence", "iterable", "callable", "sameas", "escaped", "odd", "even", "divisibleby"),
    )
)
"""Tests that do a constant amount of work for arguments of any size."""


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
        budget.spend(1)
        if type(left) is str and type(right) is str and operator == "+":
            budget.pay(len(left) + len(right))
            return left + right
        if operator == "%" and isinstance(left, str):
            budget.pay(filled_in(budget, left, right if isinstance(right, tuple) else (right,)))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * max(0, right))
        elif operator == "*" and isinstance(left, int) != isinstance(right, int):
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(repeated, Sequence):
                budget.pay(max(0, times) * len(repeated) * (1 if isinstance(repeated, str) else ITEM))
        elif not isinstance(left, int | float):
            budget.pass_over(left)
            budget.pass_over(right)
        return budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        assert isinstance(__context, _Context)
        budget = __context.budget
        budget.spend(1 + len(args) + len(kwargs))
        method = getattr(__obj, "__wrapped__", __obj)  # unwrap the sandboxed str.format
        if isinstance(method, BuiltinMethodType | MethodType):
            args = tuple(map(_as_list, [budget] * len(args), args))
            kwargs = {name: _as_list(budget, value) for name, value in kwargs.items()}
            _pay_for_method(budget, method.__self__, method.__name__, [*args, *kwargs.values()])
        elif __obj is dict:  # the keys are hashed with all their items
            for value in args:
                budget.read(value)
        for value in chain(args, kwargs.values()):
            budget.pass_over(value)
        return budget.made(super().call(__context, __obj, *args, **kwargs))


def _as_list(budget: Budget, value: Any) -> Any:
    return list(budget.made(value)) if isinstance(value, Iterator) else value


def _pay_for_method(budget: Budget, owner: Any, name: str, values: Sequence[Any]) -> None:
    """Take steps for a method call. Raises TemplateError if the method is not available."""
    kind = next((kind for kind in METHODS if isinstance(owner, kind)), None)
    if kind is None and not isinstance(owner, int | float | bytes | range | set | type):  # a method of a jinja2 object
        for value in values:
            budget.read(value)
    elif kind is None or name not in METHODS[kind]:
        raise jinja2.TemplateError(f"it calls the method {name} of a {type(owner).__name__}, which is not available")
    elif kind is not str:
        for value in values if kind is Mapping else (owner, *values):
            budget.read(value)
    else:
        longest = max((len(value) for value in values if isinstance(value, str)), default=0)
        budget.spend((len(owner) >> CHARACTERS) + (len(owner) * longest >> 2 * CHARACTERS))
        if name in ("format", "format_map") and any("{" in (form or "") for _, _, form, _ in Formatter().parse(owner)):
            raise TooManySteps("it uses a format with a width that is itself a field")
        if name in GROWING:
            budget.pay(GROWING[name](budget, owner, values))


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, int) and abs(value) > LARGEST_ARGUMENT:
        raise TooManySteps(f"it passes a number that is too large to the filter {name}")


def _pay_for_filter(budget: Budget, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Take steps for a filter whose result may be larger than its arguments. `value` is the first argument of the
    filter, and `args` and `kwargs` are its other arguments.
    """
    others = [*args, *kwargs.values()]
    for each in others if name not in ANY_NUMBER else ():
        _check_number(name, each)
    if name in ATTRIBUTES:
        place = ATTRIBUTES[name]
        attribute = kwargs.get("attribute", args[place] if place is not None and place < len(args) else "")
        if isinstance(attribute, str) and len(attribute) > LONGEST_ATTRIBUTE:
            raise TooManySteps(f"it passes an attribute that is too long to the filter {name}")
        if attribute != "":
            budget.spend(LOOK_UP * (1 + str(attribute).count(".")) * len(value))
    if name in LISTING:
        budget.list_items(value)
    texts = [each for each in others if isinstance(each, str)]
    longest = max(map(len, texts), default=0)
    if name == "join":
        budget.pay(budget.weigh(value) + (ITEM + longest) * len(value))
    elif name == "sum":
        budget.spend(len(value) * budget.weigh(value) >> 2 * CHARACTERS)
    elif name == "replace":
        text = str(value)
        old = kwargs.get("old", args[0] if args else "")
        budget.pay(len(text) + text.count(old) * longest)
    elif name == "indent":
        width = max([4, longest, *(each for each in others if isinstance(each, int))])
        budget.pay(len(str(value)) + count_lines(str(value)) * width)
    elif name == "format":
        budget.pay(filled_in(budget, str(value), others))


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
        budget.spend(1 + len(args) + len(kwargs))
        if name in ATTRIBUTES:  # the work of these filters depends on the items
            args = (_as_list(budget, args[0]), *args[1:])
        for value in chain(args, kwargs.values()) if name not in CONSTANT else ():
            walked(budget, value)
        if is_filter:
            _pay_for_filter(budget, name, args[0], args[1:], kwargs)
        return budget.made(function(*given(context), *args, **kwargs))

    return jinja2.pass_context(counted)


# Filters that wrap the nodes of a template to take steps -------------------------------------------------


@jinja2.pass_context
def _printed(context: _Context, value: Any) -> Any:
    """Take steps for a value that is converted to text."""
    context.budget.spend(1 + (context.budget.weigh(value) >> CHARACTERS))
    return value


@jinja2.pass_context
def _compared(context: _Context, value: Any) -> Any:
    budget = context.budget
    budget.spend(1)
    if isinstance(value, Collection):
        budget.read(value)
    return value


@jinja2.pass_context
def _built(context: _Context, value: Any) -> Any:
    """Take steps for a new container, or for a slice of a container."""
    context.budget.spend(1)
    return context.budget.made(value)


@jinja2.pass_context
def _spread(context: _Context, value: Any) -> Any:
    """Take steps for a value whose items become the arguments of a call."""
    value = _as_list(context.budget, value)
    context.budget.list_items(value)
    return value


@jinja2.pass_context
def _stepped(context: _Context, size: int) -> bool:
    """Take steps for an iteration or call. `size` is the size of the part of the template that the iteration or call
    runs.
    """
    context.budget.spend(1 + (size >> CHARACTERS))
    return True


_NODES = {"-printed": _printed, "-compared": _compared, "-built": _built, "-spread": _spread, "-stepped": _stepped}
"""The five filters above, by name. A template cannot use these names, because they are not valid in Jinja2."""
_NODE = 4
"""The size of a node of a template, in addition to the size of its text and of the nodes inside it."""


class _Metering(jinja2.visitor.NodeTransformer):
    """Wraps the nodes of a template in the filters of `_NODES`."""

    def __init__(self, tree: nodes.Template) -> None:
        self._sizes = dict[int, int]()
        self._measure(tree)
        if len(self._sizes) > MOST_NODES:
            raise jinja2.TemplateError(
                f"it has {len(self._sizes):,} statements, expressions and texts, but at most {MOST_NODES:,} are allowed"
            )

    def _measure(self, node: nodes.Node) -> int:
        """Record the size of a node and of all nodes in it."""
        own = len(node.data) if isinstance(node, nodes.TemplateData) else 0
        self._sizes[id(node)] = size = _NODE + own + sum(map(self._measure, node.iter_child_nodes()))
        return size

    def _around(self, name: str, node: Any) -> Any:
        plain = isinstance(node, nodes.Const | nodes.TemplateData)
        return node if plain else nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def _step(self, node: Any) -> Any:
        size = self._sizes[id(node)]
        return nodes.Filter(nodes.Const(size), "-stepped", [], [], None, None, lineno=node.lineno)

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

    visit_Tuple = visit_List  # noqa: N815

    def visit_Dict(self, node: Any) -> Any:  # noqa: N802
        for pair in node.items:  # a key is hashed with all its items before the mapping is built
            pair.key = self._around("-compared", pair.key)
        return self.visit_List(node)

    def visit_Getitem(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return self._around("-built", node)
        node.arg = self._around("-compared", node.arg)
        return node

    def visit_Call(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        for name in ("dyn_args", "dyn_kwargs"):
            if getattr(node, name) is not None:
                setattr(node, name, self._around("-spread", getattr(node, name)))
        return node

    visit_Filter = visit_Test = visit_Call  # noqa: N815


# The environment ------------------------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}`. Its text is passed to the function `mark_generation`, if there is one, and the
    result is printed.
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
    """Convert a value to JSON as transformers does. Steps are also taken for the JSON text, because indentation can
    make it much longer than the value.
    """
    budget = context.budget
    budget.spend(1 + (budget.weigh(value) >> CHARACTERS))
    for size in (indent, budget.weigh(indent), budget.weigh(separators)):
        _check_number("tojson", size)
    budget.spend(budget.weigh(value) * budget.weigh(separators) >> 2 * CHARACTERS)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    parts = [encoder.encode(value)] if indent is None else encoder.iterencode(value)
    return "".join(map(budget.made, parts))


@jinja2.pass_context
def _raise(context: _Context, message: Any) -> None:
    context.budget.read(message)
    raise jinja2.TemplateError(str(message))


def _draw(*_: Any, **__: Any) -> None:
    raise jinja2.TemplateError("it uses random numbers, so its text would differ from run to run")


_PLACES = re.compile(r"%[-_0^#+]*\d*[EO]?(.)", re.DOTALL)
"""Matches a field in a time format. The group is the code of the field."""


@jinja2.pass_context
def _strftime_now(context: _Context, form: str) -> str:
    _check_number("strftime_now", len(form))
    context.budget.pay(filled_in(context.budget, form, ()))
    if any(place.endswith("s") for place in _PLACES.findall(form)):
        raise jinja2.TemplateError(
            "it formats the time with the strftime code '%s', which depends on the time zone of the machine"
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
    tests |= {name: _counting(name, tests[name], is_filter=False) for name in tests.keys() - CONSTANT_TESTS}
    tests["none"] = is_none
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now, "lipsum": _draw}
    parsed = environment.parse(source)
    tree = _Metering(parsed).visit(parsed)
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
