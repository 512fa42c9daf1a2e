"""The lines of a ConfigError: where a key was written, what is wrong with it, and the nearest right word."""

from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic_core import ErrorDetails

from megatron_coca.config.errors import nearest
from megatron_coca.config.neox_keys import ALIASES, INERT
from megatron_coca.config.schema import GROUPS, KEYS, NESTED
from megatron_coca.config.source import Layer

EXPECTED: dict[str, str] = {
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "dict_type": "expected a mapping",
    "model_type": "expected a mapping",
    "finite_number": "expected a finite number",
}
SYNONYMS: dict[str, str] = {"bf16": "bfloat16", "float16": "fp16", "float32": "fp32", "rope": "rotary"}
KNOWN = (*KEYS, *INERT, *ALIASES, *(f"{key}.{name}" for key, names in NESTED.items() for name in names))


class Problems:
    """Lines of the form `place: key: message`."""

    def __init__(self, source: Layer) -> None:
        self.source = source
        self.lines: list[str] = []
        self.keys: set[str] = set()

    def add(self, key: str, message: str) -> None:
        """Record a fault of `key`, which is unreliable from then on."""
        self.lines.append(f"{self._place(key)}: {key}: {message}")
        self.keys.add(owner_of(key))

    def _place(self, path: str) -> str:
        """Where `path` was written, else a name inside it, else the mapping around it."""
        path = path.partition("[")[0]
        where = self.source.where
        inside = (place for written, place in where.items() if written.startswith(f"{path}."))
        around = (where[path[:end]] for end in range(len(path), 0, -1) if path[:end] in where and path[end:][:1] == ".")
        return where.get(path) or next(inside, None) or next(around, self.source.label)


def owner_of(path: str) -> str:
    """The key of the schema to which a path such as `rope_scaling.factor` or `a[0]` belongs."""
    path = path.partition("[")[0]
    return path if path in KEYS else path.rpartition(".")[0] if "." in path else path


def path_of(fault: ErrorDetails) -> str:
    """The dotted path of the value that pydantic refuses."""
    first, *rest = fault["loc"]
    return str(first) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)


def report(fault: ErrorDetails, problems: Problems) -> None:
    """Add pydantic's finding to `problems` in our words."""
    key, value, kind = path_of(fault), fault["input"], fault["type"]
    if kind == "missing":
        problems.add(key, "required, but missing")
    elif kind == "extra_forbidden":
        problems.add(key, f"unknown key{nearest(key, KNOWN)}")
    elif kind == "literal_error":
        names = [str(choice) for choice in choices_of(key)]
        problems.add(
            key, f"`{value}` is not one of {' | '.join(names)}{nearest(SYNONYMS.get(str(value), str(value)), names)}"
        )
    else:
        message = EXPECTED.get(kind) or fault["msg"].replace("Input should be", "expected a value")
        problems.add(key, f"{message}, got {value!r}{_hint(kind, value)}")


def _hint(kind: str, value: Any) -> str:
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    return "; remove the quotes" if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type") else ""


def choices_of(key: str) -> tuple[Any, ...]:
    """The choices of a key, also of one inside a mapping such as `rope_scaling.rope_type`, or of an item of a list."""
    owner = owner_of(key)
    annotation: Any = GROUPS[KEYS[owner].group].model_fields[KEYS[owner].field].annotation
    if "." in key.removeprefix(owner):
        nested = next(kind for kind in get_args(annotation) if kind is not type(None))
        annotation = nested.model_fields[key.rpartition(".")[2]].annotation
    return leaves(annotation)


def leaves(annotation: Any) -> tuple[Any, ...]:
    """The values of a Literal, also of one inside a union or an Annotated; of anything else none."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    parts = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return tuple(value for part in parts for value in leaves(part))
