"""requirements.txt, requirements-dev.txt, pyproject.toml and the imports of the package say the same."""

import ast
import os
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def parse(lines: list[str]) -> dict[str, Requirement]:
    """Requirements by canonical name; a name given twice is an error."""
    found = [Requirement(line) for line in lines]
    by_name = {canonicalize_name(requirement.name): requirement for requirement in found}
    assert len(by_name) == len(found), f"a name is given twice: {lines}"
    return by_name


def pins(name: str) -> dict[str, Requirement]:
    """The requirements of a file, its comments and the files it includes left out."""
    lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
    return parse([line for line in lines if line and not line.startswith(("#", "-r"))])


RUNTIME, DEVELOPMENT = pins("requirements.txt"), pins("requirements-dev.txt")
DECLARED = parse(PROJECT["dependencies"])
COMMANDS = set(parse(EXTRAS["logging"] + EXTRAS["harness"]))
"""Extras that commands of the README use."""
OPTIONAL = {
    name
    for extra in ("logging", "corpora", "harness", "gguf", "adapters", "kernels", "object-stores")
    for name in parse(EXTRAS[extra])
}
UNINSTALLED = {name for extra in ("cluster", "mlflow", "comet") for name in parse(EXTRAS[extra])}
"""Libraries of schedulers and services, which the development environment does not need: tests skip without them."""
PINNED_BY_PYDANTIC = {"pydantic-core"}
"""One version of pydantic asks for exactly one of these, so a pin of our own could only contradict it."""
DISTRIBUTIONS = {"mlflow": ["mlflow-skinny", "mlflow"]}
"""Distributions of modules that the development environment does not need."""
SHIPPED = {"transformers"}
"""Imported by the modelling file that exports carry, which nothing in the package imports."""


def lowest(requirement: Requirement) -> str:
    """The version that a pin (== or ~=) names."""
    (specifier,) = requirement.specifier
    assert specifier.operator in ("==", "~="), f"{requirement} is not pinned"
    return specifier.version


def imported(folder: str) -> set[str]:
    """Top-level names of all absolute imports below `folder`, those inside functions included."""
    names: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"megatron_coca"}


def test_requirements_are_what_the_commands_of_the_readme_need() -> None:
    assert set(RUNTIME) == set(DECLARED) | COMMANDS


def test_development_requirements_are_the_extras() -> None:
    assert set(DEVELOPMENT) == set(parse(EXTRAS["dev"])) | OPTIONAL - COMMANDS
    assert "-r requirements.txt" in (ROOT / "requirements-dev.txt").read_text().splitlines()


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_every_pin_lies_in_the_supported_range(name: str) -> None:
    assert DECLARED[name].specifier.contains(lowest(RUNTIME[name]))


@pytest.mark.parametrize("name", sorted(RUNTIME | DEVELOPMENT))
def test_what_is_installed_is_what_the_files_ask_for(name: str) -> None:
    pinned = (RUNTIME | DEVELOPMENT)[name]
    installed = version(pinned.name)
    assert pinned.specifier.contains(installed), f"{pinned}, but {installed} is installed: install requirements-dev.txt"


def test_every_import_of_the_package_is_declared() -> None:
    providers = packages_distributions()
    allowed = set(DECLARED) | OPTIONAL | PINNED_BY_PYDANTIC | SHIPPED | UNINSTALLED
    for module in imported("megatron_coca"):
        names = {canonicalize_name(name) for name in providers.get(module, DISTRIBUTIONS.get(module, [module]))}
        assert names & allowed, f"import {module}: declare one of {sorted(names)} in pyproject.toml, requirements.txt"


@pytest.mark.parametrize("gpu", [False, True])
def test_make_takes_the_cpu_build_where_no_gpu_is(tmp_path: Path, gpu: bool) -> None:
    for name in ("python3", "sh", "grep", *["nvidia-smi"] * gpu):
        (tmp_path / name).symlink_to("/bin/true" if name == "nvidia-smi" else f"/usr/bin/{name}")
    make, environment = ["/usr/bin/make", "-n", "-B", ".venv/ready"], {**os.environ, "PATH": str(tmp_path)}
    environment.pop("MAKEFLAGS", None)  # has the variables of `make test TORCH_INDEX=...`
    said = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    cpu = [line for line in said.splitlines() if "https://download.pytorch.org/whl/cpu torch==" in line]
    assert len(cpu) == (not gpu) and said.count("install") == 3 - gpu
    assert not cpu or str(RUNTIME["torch"]) in cpu[0]
