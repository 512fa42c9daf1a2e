"""Imports go one way, layer by layer, and each restricted library is imported by one package only."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = "megatron_coca"
ENTRY_POINTS = ("train.py", "evaluate.py", "tools")

LAYERS = (
    {"support"},
    {"work"},
    {"sinks"},
    {"methods"},
    {"config", "kernels"},
    {"attention", "data"},
    {"model"},
    {"checkpoints"},
    {"text_generation", "neox_plugin"},
    {"training", "evaluation"},
    {"ablation"},
    {"__init__"},
    {"commands"},
    {"cli"},
    {"__main__"},
    {"train", "evaluate", "tools"},
)
"""A module may import from layers above its own in this table and from its own package, nothing else."""

ENTRIES = ("load", "importing", "exporting", "inspection")
"""Modules of `checkpoints` that import all layouts."""
FORBIDDEN = (
    ("config", ("torch", f"{PACKAGE}.attention")),
    ("data", ("torch", f"{PACKAGE}.config", f"{PACKAGE}.attention")),
    (
        "attention.positions",
        tuple(f"{PACKAGE}.{name}" for name in ("config", "attention.backends", "attention.inputs")),
    ),
    ("attention.backends", (f"{PACKAGE}.config", f"{PACKAGE}.attention.positions")),
    *(
        (f"checkpoints.{layout}", tuple(f"{PACKAGE}.checkpoints.{name}" for name in ENTRIES))
        for layout in ("native", "huggingface", "neox")
    ),
    ("tests.reference", (PACKAGE,)),
)
"""(module or package below the package, what it must not import)."""

ALONE: dict[str, set[str]] = {
    "deepspeed": {f"{PACKAGE}.training.engine"},
    "megatron": set(),
    "rich": {f"{PACKAGE}.support.console"},
    "tqdm": set(),
}
"""The only modules, or packages, that import a library. GPT-NeoX has its own package `megatron`; ours imports
neither."""


@dataclass(frozen=True)
class Import:
    """Module `source` imports `target`, at a line of its file."""

    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source} imports {self.target} (line {self.line})"


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def modules(root: Path) -> dict[str, Path]:
    """Every module of the package and the entry points by its dotted name; a package's own file has the package's
    name.
    """
    entries = [root / name for name in ENTRY_POINTS]
    files = [
        *(root / PACKAGE).rglob("*.py"),
        *(file for entry in entries for file in ([entry] if entry.is_file() else entry.glob("*.py"))),
    ]
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports(root: Path) -> Iterator[Import]:
    """All imports, inside functions too; `from a import b` counts as a.b where that is a module."""
    known = modules(root)
    for source, file in known.items():
        for node in ast.walk(ast.parse(file.read_text(), str(file))):
            if isinstance(node, ast.Import):
                yield from (Import(source, alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{file}:{node.lineno}: relative import"
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield Import(source, inner if inner in known else str(node.module), node.lineno)


def place(module: str) -> str:
    """The folder of the package, or the entry point, that a module belongs to."""
    parts = module.split(".")
    return (parts[1] if len(parts) > 1 else "__init__") if parts[0] == PACKAGE else parts[0]


def layer(name: str) -> int:
    found = [number for number, names in enumerate(LAYERS) if name in names]
    assert found, f"{name}: in no layer; add it to LAYERS"
    return found[0]


def violations(root: Path) -> list[str]:
    """Every import that goes upwards or sideways, or that a stricter rule forbids."""
    known, found = modules(root), []
    for each in imports(root):
        own, target = place(each.source), place(each.target)
        ours = each.target in known or within(each.target, PACKAGE)
        if ours and own != target and layer(own) <= layer(target):
            found.append(str(each))
        found += [str(each) for where, what in FORBIDDEN if _forbidden(each, where, what)]
        found += [
            str(each)
            for library, allowed in ALONE.items()
            if within(each.target, library) and not any(within(each.source, package) for package in allowed)
        ]
    return found


def _forbidden(each: Import, where: str, what: tuple[str, ...]) -> bool:
    return within(each.source, f"{PACKAGE}.{where}") and any(within(each.target, name) for name in what)


def cycles(root: Path) -> list[list[str]]:
    """Modules that import each other in a circle."""
    known = modules(root)
    edges: dict[str, set[str]] = {name: set() for name in known}
    for each in imports(root):
        if each.target in known and each.target != each.source:
            edges[each.source].add(each.target)
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for target in sorted(edges[name]):
                visit(target, [*path, name])
            done.add(name)

    for name in sorted(known):
        visit(name, [])
    return found


def _run_at_import(body: Sequence[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run with the module: none of functions, and none for types only."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for block in ("orelse", "handlers", "finalbody", *(() if typing_only else ("body",))):
                yield from _run_at_import(getattr(node, block, []))


def unfinished(root: Path) -> list[str]:
    """Names that are imported from a module before it has run, if a program imports some module first."""
    known, found = modules(root), set[str]()
    wanted: dict[str, list[tuple[str, bool]]] = {name: [] for name in known}  # our modules; whether a name is taken
    for source, file in known.items():
        for node in _run_at_import(ast.parse(file.read_text(), str(file)).body):
            origin = node.module if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                inner = f"{origin}.{alias.name}" if origin else alias.name
                if within(inner, PACKAGE):
                    wanted[source].append((inner, False) if inner in known else (str(origin), True))

    def load(module: str, begun: set[str], done: set[str]) -> None:
        parts = module.split(".")
        for name in (
            ".".join(parts[:count]) for count in range(1, len(parts) + 1)
        ):  # packages run before their modules
            if name not in known or name in begun:
                continue
            begun.add(name)
            for target, takes_name in wanted[name]:
                load(target, begun, done)
                if takes_name and target in begun - done and not within(name, target):
                    found.add(f"{name} imports from {target}")
            done.add(name)

    for module in known:
        load(module, set(), set())
    return sorted(found)


@pytest.mark.always
def test_every_module_can_be_imported_first() -> None:
    """The file of a package may import a module that imports from the package."""
    assert not unfinished(ROOT)


@pytest.mark.always
def test_imports_go_one_way() -> None:
    assert not violations(ROOT)


def test_the_oracle_imports_nothing_of_the_package() -> None:
    for file in (ROOT / "tests/reference").glob("*.py"):
        assert PACKAGE not in file.read_text(), file


@pytest.mark.parametrize("module", [PACKAGE, f"{PACKAGE}.config", f"{PACKAGE}.data"])
def test_config_and_data_load_no_torch(module: str) -> None:
    """Nor through another library, or through the package's own file."""
    code = f"import sys, {module}; print([name for name in ('torch', 'megatron', 'deepspeed') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_evaluated_model_loads_no_compiler() -> None:
    """TorchDynamo takes 2 seconds to import, which every evaluation and every first token would wait for."""
    code = (
        "import sys, torch; from megatron_coca import load_config; from megatron_coca.model.build import empty_model;"
        "keys = {'num_layers': 1, 'hidden_size': 32, 'num_attention_heads': 2, 'seq_length': 16, 'vocab_size': 64};"
        "empty_model(load_config([], keys), 'cpu', training=False)(torch.zeros(1, 16, dtype=torch.long));"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_package_offers_its_names_when_they_are_asked_for() -> None:
    import megatron_coca

    assert set(megatron_coca.__all__) <= set(dir(megatron_coca))
    assert all(callable(getattr(megatron_coca, name)) for name in megatron_coca.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        megatron_coca.nothing  # noqa: B018


def test_no_cycles() -> None:
    assert not cycles(ROOT)


@pytest.mark.always
def test_the_tree_is_read() -> None:
    known, found = modules(ROOT), list(imports(ROOT))
    assert {"train", f"{PACKAGE}.training.trainer", f"{PACKAGE}.attention.backends.sdpa", PACKAGE} <= known.keys()
    assert any(
        each.source == f"{PACKAGE}.training.engine.deepspeed_engine" and each.target == "deepspeed" for each in found
    )
    assert any(each.target == "datasets" for each in found), "inside a function"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("config/load.py", "import torch.nn"),
        ("config/load.py", "from megatron_coca import attention"),
        ("data/blend.py", "from megatron_coca.config import Config"),
        ("data/loader.py", "def f():\n    import torch"),
        ("attention/layer.py", "def f():\n    from megatron_coca.model.gpt import GPT"),
        ("attention/layer.py", "from megatron_coca.data.blend import Blend"),
        ("attention/positions/bias.py", "from megatron_coca.attention.inputs import Needs"),
        ("attention/backends/sdpa.py", "from megatron_coca.attention.positions import bias"),
        ("evaluation/suite.py", "from megatron_coca.training.trainer import fit"),
        ("training/trainer.py", "import deepspeed.comm as dist"),
        ("data/loader.py", "from megatron.core.datasets import indexed_dataset"),
        ("model/gpt.py", "import train"),
    ],
)
def test_the_check_can_fail(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / PACKAGE / file
    path.parent.mkdir(parents=True)
    path.write_text(f"{line}\n")
    (tmp_path / "train.py").write_text("")
    assert len(violations(tmp_path)) == 1


def test_a_cycle_is_found(tmp_path: Path) -> None:
    folder = tmp_path / PACKAGE / "model"
    folder.mkdir(parents=True)
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        (folder / f"{name}.py").write_text(f"def f():\n    from {PACKAGE}.model import {other}\n    return {other}\n")
    assert cycles(tmp_path) == [[f"{PACKAGE}.model.{name}" for name in "abca"]]


def test_an_unfinished_module_is_found(tmp_path: Path) -> None:
    """`a` alone is in no circle, but importing it runs the file of the package that has `b`, which imports `a`."""
    files = {
        "tasks/__init__.py": "",
        "tasks/a.py": f"from {PACKAGE}.report.b import B\nA = B",
        "report/__init__.py": f"from {PACKAGE}.report.all import ALL",
        "report/all.py": f"from {PACKAGE}.tasks.a import A\nALL = A",
        "report/b.py": f"if TYPE_CHECKING:\n    from {PACKAGE}.tasks.a import A\nB = 1",
    }
    for name, text in files.items():
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert unfinished(tmp_path) == [f"{PACKAGE}.report.all imports from {PACKAGE}.tasks.a"]
