"""Requirements of the GPT-NeoX plugin: Python 3.10, PyTorch 2.3, PyYAML and pydantic, which GPT-NeoX installs too.

`NEOX_PLUGIN_OLDEST_PYTHON` names an interpreter of such an environment; without it, imports and names are looked at.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.build import BACKENDS, select_backend
from megatron_coca.attention.inputs import CAUSAL, AttentionInputs, BackendError, Needs, Segment
from megatron_coca.neox_plugin import activate
from tests.conftest import ROOT, clean_environment
from tests.neox.stub_outputs import outputs
from tests.neox.stubbed import STUB, Upstream, stub

__all__ = ["stub"]

OLDEST = "NEOX_PLUGIN_OLDEST_PYTHON"
"""An environment variable that only this test reads."""

CASES: dict[str, dict[str, Any]] = {
    "coca": {"pos_emb": "coca"},
    "strict, partial": {"pos_emb": "coca_strict", "rotary_pct": 0.5},
    "xpos": {"pos_emb": "xpos"},
    "yarn": {"pos_emb": "rotary", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "map": {"pos_emb": "rotary", "relative_positions": {"type": "rerope"}},
    "map, grouped": {"pos_emb": "rotary", "relative_positions": {"type": "rerope"}, "num_kv_heads": 2}
    | {"attention_config": ["flash", "flash"]},
    "logits": {"pos_emb": "none", "logit_scaling": "log_n"},
    "grouped": {"pos_emb": "coca", "num_kv_heads": 2, "attention_config": ["flash", "flash"]},
}

ABSENT = (
    *("opt_einsum", "deepspeed", "sentencepiece", "tokenizers", "safetensors", "zstandard", "pyarrow", "transformers"),
    *("matplotlib", "datasets", "tensorboard", "wandb", "triton", "flash_attn"),
)
"""Packages that this one uses and that the plugin must do without."""

HAS = {"torch", "yaml", "pydantic", "pydantic_core", "typing_extensions", PACKAGE := "megatron_coca"}
"""What a module of the plugin may import at its top besides the standard library; the last two come with pydantic."""

NEWER_THAN_PYTHON_3_10 = {
    *(f"typing.{name}" for name in ("Self", "Never", "LiteralString", "Required", "NotRequired", "Unpack", "override")),
    *("typing.assert_never", "typing.assert_type", "typing.reveal_type", "typing.TypeVarTuple", "enum.StrEnum"),
    *("enum.verify", "datetime.UTC", "hashlib.file_digest", "contextlib.chdir", "tomllib", "itertools.batched"),
    *("math.cbrt", "math.exp2", "math.sumprod", "operator.call", "asyncio.TaskGroup", "asyncio.timeout"),
    *("warnings.deprecated", "collections.abc.Buffer", "inspect.getmembers_static", "ExceptionGroup"),
}

IN_TORCH_2_3 = {
    *("Tensor", "__version__.split", "addcmul", "addmm", "addmv", "arange"),
    *("autograd.Function", "baddbmm", "eye", "maximum", "nn.Linear", "nn.ModuleDict", "nn.functional.linear"),
    *("abs", "neg", "nn.functional.logsigmoid", "nn.functional.softplus"),
    *("autograd.function.FunctionCtx", "autograd.function.once_differentiable", "bfloat16", "bool", "bucketize", "cat"),
    *("device", "dropout", "ones", "ones_like", "utils.checkpoint.checkpoint"),
    *("compiler.is_compiling", "cuda.get_device_capability", "cuda.is_available", "distributed.ReduceOp.MAX"),
    *("distributed.all_reduce", "distributed.get_backend"),
    *("distributed.get_rank", "distributed.get_world_size", "distributed.is_initialized", "dtype", "empty"),
    *("empty_like", "equal", "exp", "finfo", "float16", "float32", "float64", "full", "full_like", "inf"),
    "inference_mode",
    *(
        "int32",
        "is_grad_enabled",
        "linalg.vector_norm",
        "log",
        "log1p",
        "logaddexp",
        "long",
        "mul",
        "nn.Module",
        "nn.Parameter",
    ),
    *("nn.attention.bias.causal_lower_right", "nn.functional.pad", "nn.functional.scaled_dot_product_attention"),
    *("nn.init.xavier_normal_", "no_grad", "ops.aten._scaled_dot_product_efficient_attention", "promote_types"),
    *("ops.aten._scaled_dot_product_efficient_attention_backward", "ops.aten._scaled_dot_product_flash_attention"),
    *("ops.aten._scaled_dot_product_flash_attention_backward", "relu", "sigmoid", "softmax"),
    *("ops.aten._scaled_dot_product_flash_attention_for_cpu", "square", "stack", "tanh", "tensor", "uint64", "where"),
    *("ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", "zeros", "zeros_like"),
}
"""Names of torch that the plugin's modules use. Add one only after the named interpreter's test passes with it."""

OPTIONAL = {
    *(f"nn.attention.flex_attention.{name}" for name in ("BlockMask", "BlockMask.from_kv_blocks", "flex_attention")),
    *("_dynamo.config.patch", "compile", "library.custom_op"),
    *("_fused_sdp_choice", "backends.cudnn.version", "set_grad_enabled"),  # names the kernel, outside of the plugin
    *("backends.cuda.cudnn_sdp_enabled", "backends.cuda.enable_cudnn_sdp", "are_deterministic_algorithms_enabled"),
    *("ops.aten._flash_attention_backward", "ops.aten._flash_attention_forward"),
    "utils.tensorboard.SummaryWriter",  # imported when our trainer opens the sink, so never inside GPT-NeoX
}
"""Names behind a check that PyTorch has them, FlexAttention, windows or the switch of cuDNN, or that the plugin never
uses.
"""


def run(python: str, cases: dict[str, Any], folder: Path, *denied: str) -> dict[str, dict[str, list[float]]]:
    """What tests/neox/stub_outputs.py finds with an interpreter."""
    given, out = folder / "cases.json", folder / "out.json"
    given.write_text(json.dumps(cases))
    paths = os.pathsep.join([str(STUB), str(ROOT)])
    command = [python, str(ROOT / "tests/neox/stub_outputs.py"), str(given), str(out), *denied]
    environment = clean_environment({"PYTHONPATH": paths})
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.mark.slow
def test_it_runs_with_only_the_packages_of_gpt_neox(stub: Upstream, tmp_path: Path) -> None:
    activate()
    expected, found = outputs(CASES), run(sys.executable, CASES, tmp_path, *ABSENT)
    for name, values in expected.items():
        for kind, numbers in values.items():
            assert found[name][kind] == pytest.approx(numbers, rel=1e-5, abs=1e-5), (name, kind)


@pytest.mark.skipif(OLDEST not in os.environ, reason=f"set {OLDEST} to a Python 3.10 with PyTorch 2.3")
def test_it_runs_with_the_oldest_python_and_torch(stub: Upstream, tmp_path: Path) -> None:
    python = os.environ[OLDEST]
    versions = "import sys, torch; print(sys.version_info[:2], torch.__version__)"
    said = subprocess.run([python, "-c", versions], capture_output=True, text=True, check=True).stdout
    assert said.startswith("(3, 10) 2.3."), said
    activate()
    expected, found = outputs(CASES), run(python, CASES, tmp_path, *ABSENT)
    for name, values in expected.items():
        for kind, numbers in values.items():
            assert found[name][kind] == pytest.approx(numbers, rel=1e-5, abs=1e-5), (name, kind)
    names = json.dumps(sorted(IN_TORCH_2_3))
    code = f"import operator, torch, torch.nn.attention.bias; [operator.attrgetter(name)(torch) for name in {names}]"
    subprocess.run([python, "-c", code], check=True)


@cache
def loaded() -> dict[str, Path]:
    """The modules of this package that the plugin's launcher imports, and their files."""
    code = f"import json, sys, {PACKAGE}.neox_plugin.__main__; print(json.dumps({{n: m.__file__ for n, m in "
    code += f"sys.modules.items() if n.split('.')[0] == '{PACKAGE}'}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name: Path(file) for name, file in json.loads(done.stdout).items()}


def parsed() -> Iterator[tuple[str, ast.Module]]:
    """Each of them in the grammar of Python 3.10."""
    for name, file in loaded().items():
        yield name, ast.parse(file.read_text(), str(file), feature_version=(3, 10))


def names(tree: ast.Module, packages: tuple[str, ...] = ()) -> set[str]:
    """The dotted names that a module imports or reads as attributes, by full name; of `packages`, if any are given."""
    found, alias = set(), {"aten": "torch.ops.aten"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            alias |= {each.asname or each.name.split(".")[0]: each.name for each in node.names if each.asname}
            alias |= {each.name.split(".")[0]: each.name.split(".")[0] for each in node.names if not each.asname}
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            alias |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            found |= {f"{node.module}.{each.name}" for each in node.names}
    for node in ast.walk(tree):
        first, *rest = ast.unparse(node).split(".") if isinstance(node, ast.Attribute | ast.Name) else [""]
        if all(part.isidentifier() for part in (first, *rest)):
            found.add(".".join([alias.get(first, first), *rest]))
    return {name for name in found if not packages or name.split(".")[0] in packages}


def test_every_module_is_in_the_grammar_and_the_library_of_python_3_10() -> None:
    assert f"{PACKAGE}.attention.backends.merge" in loaded(), "the plugin's imports are looked at"
    found = {name: names(tree) & NEWER_THAN_PYTHON_3_10 for name, tree in parsed()}
    assert not any(found.values()), {name: newer for name, newer in found.items() if newer}


def test_it_imports_the_names_of_the_checkpoint_format_only() -> None:
    """Readers and writers of checkpoints need packages that GPT-NeoX does not install."""
    package = f"{PACKAGE}.checkpoints"
    imported = {name for name in loaded() if f"{name}.".startswith(f"{package}.")}
    assert imported == {package, f"{package}.neox", f"{package}.neox.names"}


def test_every_name_of_torch_is_in_torch_2_3() -> None:
    found = set().union(*(names(tree, ("torch",)) for _, tree in parsed()))
    leaves = {name.removeprefix("torch.") for name in found if not any(other.startswith(f"{name}.") for other in found)}
    assert leaves - {"torch"} <= IN_TORCH_2_3 | OPTIONAL, leaves - IN_TORCH_2_3 - OPTIONAL
    assert leaves >= {name for name in IN_TORCH_2_3 if "." not in name}, "a name that nothing uses any more"


def test_modules_import_nothing_else_at_their_top() -> None:
    for name, tree in parsed():
        imported = {each.name for node in tree.body if isinstance(node, ast.Import) for each in node.names}
        imported |= {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert {target.split(".")[0] for target in imported} <= HAS | sys.stdlib_module_names, name


def test_a_backend_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{PACKAGE}.attention.backends.reference.find_spec", lambda name: None)
    with pytest.raises(BackendError, match="opt_einsum is not installed"):
        select_backend("reference", Needs("cpu", 8, None, (CAUSAL,), 0.0))


@pytest.mark.parametrize("backend", ["sdpa", "merge"])
def test_key_heads_are_repeated_where_pytorch_takes_no_fewer(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before PyTorch 2.5: outputs and gradients are those of its grouped kernels."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 13, 8, requires_grad=True) for heads in (4, 2, 2))

    def attend() -> list[Tensor]:
        out = BACKENDS[backend].attend(AttentionInputs((Segment(q, k, CAUSAL),), v, 0.3, None))
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    expected = attend()
    monkeypatch.setattr(f"{PACKAGE}.attention.backends.sdpa.GROUPED", False)
    for found, wanted in zip(attend(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
