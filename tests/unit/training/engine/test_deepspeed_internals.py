"""The internals of DeepSpeed that are used exist in the installed version, and only two modules use them.

The first test names the changes of an upgrade of DeepSpeed: docs/parallelism.md, "Versions of DeepSpeed".
"""

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[4]
ENGINE = Path("megatron_coca/training/engine")
HOMES = (ENGINE / "deepspeed_internals.py", ENGINE / "layouts.py")
TESTED = ("0.19.6", "0.19.8")
"""The oldest and the newest version of DeepSpeed that the tests were run with."""

_ZERO_12 = "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_ZERO_3 = "runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_GRID, _WEIGHT = "runtime.sequence_parallel.parallel_state_sp", "runtime.zero.partition_parameters"
_ENGINE, _TOPOLOGY = "runtime.engine.DeepSpeedEngine", "runtime.pipe.topology.PipeDataParallelTopology"
_RANGE, _FRAGMENT = "utils.tensor_fragment.fragment_address", "utils.tensor_fragment.tensor_fragment"
_SWAP = "sequence.layer._SeqAllToAll"

INTERNALS = (
    ("ops", "__compatible_ops__", "deepspeed_shm_comm is compiled unless this says no", "0.19.8"),
    ("runtime.config", "DeepSpeedConfigError", "raised for unsupported options", "0.19.8"),
    ("launcher.runner", "main(args)", "`python -m` calls it; training/launch/start.py does", "0.19.8"),
    ("comm.comm", "all_reduce(...)", "where a rank waits; training/monitoring/watchdog.py finds it", "0.19.8"),
    (_GRID, "_SEQUENCE_PARALLEL_GROUP", "None until the groups are made", "0.19.8"),
    (_GRID, "initialize_sequence_parallel(sequence_parallel_size)", "makes them, of consecutive ranks", "0.19.8"),
    (_GRID, "get_sequence_parallel_group()", "this rank's", "0.19.8"),
    (_SWAP, "forward(ctx, group, input, scatter_idx, gather_idx, batch_dim_idx, ...)", "differentiable", "0.19.8"),
    ("utils.groups", "get_tensor_model_parallel_rank()", "rank in the group that AutoTP makes", "0.19.8"),
    ("module_inject.autotp_config.TPLayerSpec", "grad_allreduce", "sums gradients of PER_HEAD in engine.py", "0.19.8"),
    (_TOPOLOGY, "__init__(self, num_pp, num_dp)", "consecutive ranks have the same stage", "0.19.8"),
    ("runtime.utils", "partition_balanced(weights, num_parts)", "first layer of each stage, and the end", "0.19.8"),
    ("runtime.utils", "is_model_parallel_parameter(p)", "norms count it on every tensor rank", "0.19.8"),
    ("runtime.zero.stage_1_and_2", "_zero_padding?", "set on padding among gradients, which norms leave out", "0.19.8"),
    ("runtime.pipe.module", "ds_pipe_replicated", "norms count it on another stage", "0.19.8"),
    ("runtime.pipe.engine.PipelineEngine", "fwd_outputs", "losses of the last batch", "0.19.8"),
    (_ENGINE, "enable_backward_allreduce", "the end of a backward pass", "0.19.8"),
    ("utils.mixed_precision_linkage", "_hp_mapping", "None for a weight without a part on this rank", "0.19.8"),
    (_FRAGMENT, "hp_fragment_address, lp_fragment_address", "ranges of the flat tensor and of the weight", "0.19.8"),
    (_RANGE, "start, numel", "in elements", "0.19.8"),
    (_WEIGHT, "ds_shape, ds_numel", "of the whole weight", "0.19.8"),
    (_WEIGHT, "ds_tensor, ds_process_group", "equal parts in the order of ranks, padded at the end", "0.19.8"),
    (_ZERO_12, "optimizer, loss_scaler, dtype, device, clip_grad", "PyTorch's optimizer and its options", "0.19.8"),
    (_ZERO_12, "overlap_comm, cpu_offload, reduction_stream", "how gradients are reduced", "0.19.8"),
    (_ZERO_12, "gradient_accumulation_dtype, use_grad_accum_attribute", "how they are summed", "0.19.8"),
    (_ZERO_12, "independent_gradient_partition_epilogue(self)", "replaced: waits by synchronize()", "0.19.8"),
    (_ZERO_12, "reduce_ready_partitions_and_remove_grads(self, param, i)", "replaced on one rank", "0.19.8"),
    (_ZERO_12, "get_grad_norm_direct(self, gradients, params, norm_type)", "replaced: same bits", "0.19.8"),
    (_ZERO_12, "scaled_global_norm(self, norm_type)", "replaced for stages: same bits for equal groups", "0.19.8"),
    (_ZERO_12, "complete_grad_norm_calculation_for_cpu_offload(self, params)", "offloaded", "0.19.8"),
    (_ZERO_12, "averaged_gradients, params_in_partition", "by group, of this rank's part", "0.19.8"),
    (_ZERO_12, "unscale_and_clip_grads(self, grad_groups_flat, total_norm)", "replaced: same bits", "0.19.8"),
    (_ZERO_12, "_add_to_grad_partition_buffer?(output, source)", "replaced: same bits; sums are float32", "0.19.8"),
    (_ZERO_12, "_model_parallel_all_reduce(self, tensor, op)", "over tensor ranks or stages", "0.19.8"),
    (_ZERO_12, "model_parallel_rank, dp_process_group", "norms; ranks with the same weights", "0.19.8"),
    (_ZERO_12, "_global_grad_norm", "set before PyTorch's optimizer steps; -1 if not finite", "0.19.8"),
    (_ZERO_12, "bit16_groups, single_partition_of_fp32_groups", "weights; this rank's part of them, flat", "0.19.8"),
    (_ZERO_12, "update_lp_params(self)", "copies float32 weights into the trained ones", "0.19.8"),
    (_ZERO_3, "optimizer, loss_scaler, _global_grad_norm", "as for ZeRO 1 and 2", "0.19.8"),
    (_ZERO_3, "fp16_groups, fp16_partitioned_groups_flat, fp32_partitioned_groups_flat", "as its names say", "0.19.8"),
    (_ZERO_3, "grad_position, get_param_id(self, param)", "(group, begin in its flat tensor, numel)", "0.19.8"),
    (_ZERO_3, "checkpoint_event_prologue(self), checkpoint_event_epilogue(self)", "around a change", "0.19.8"),
    ("runtime.fp16.loss_scaler.DynamicLossScaler", "cur_scale", "its state is numbers in attributes", "0.19.8"),
)
"""For each internal: a module or class below `deepspeed`; the names that it defines or sets, a function with its
parameters ("..." leaves out further optional ones); their use; the newest version in which their code was read.
"?" marks names that the oldest tested version does not have.
"""

NAME = re.compile(r"(?P<name>\w+)(?P<optional>\??)(?:\((?P<parameters>[^)]*)\))?")
PUBLIC_MODULES = {"deepspeed", "deepspeed.pipe"}
PUBLIC = {
    "deepspeed": {"initialize", "init_distributed"},
    "self._engine": {
        *(
            "backward",
            "destroy",
            "device",
            "eval",
            "eval_batch",
            "fp16_enabled",
            "module",
        ),
        *("optimizer", "reset_activation_shape", "step", "train", "train_batch"),
    },
    "self._engine.optimizer": {"loss_scale", "param_groups"},
}
"""Attributes that DeepSpeed documents, by the object as it is written in training/engine/."""
OF_OTHERS = {"clip_grad", "device", "dtype", "main", "numel", "optimizer", "start", "all_reduce", "forward", "__init__"}
"""Names in the table that other objects also have."""


def listed() -> Iterator[tuple[str, re.Match[str]]]:
    for owner, names, *_ in INTERNALS:
        yield from ((owner, match) for match in NAME.finditer(names))


def resolved(owner: str) -> Any:
    """The module or class `owner` below deepspeed."""
    try:
        return importlib.import_module(f"deepspeed.{owner}")
    except ModuleNotFoundError:
        module, _, name = owner.rpartition(".")
        return getattr(importlib.import_module(f"deepspeed.{module}"), name)


def source(owner: Any) -> str:
    """The code of a module, or of a class and its bases in DeepSpeed."""
    classes = inspect.getmro(owner) if inspect.isclass(owner) else ()
    own = [each for each in classes if each.__module__.startswith("deepspeed.")] or [owner]
    return "".join(inspect.getsource(each) for each in own)


def change(owner: str, match: re.Match[str]) -> str | None:
    """Return the difference between a name of the table and the installed version; None if there is none."""
    name, parameters = match["name"], match["parameters"]
    try:
        found = resolved(owner)
    except (ImportError, AttributeError):
        return f"deepspeed.{owner} does not exist"
    if match["optional"] and Version(version("deepspeed")) < Version(TESTED[-1]):
        return None
    if parameters is None:
        is_there = hasattr(found, name) or name in getattr(found, "__annotations__", {})
        is_there = is_there or re.search(rf"\.{name}(: [^=\n]+)? = ", source(found))
        return None if is_there else f"deepspeed.{owner} neither has nor sets {name}"
    if not callable(getattr(found, name, None)):
        return f"deepspeed.{owner} has no function {name}"
    given = [parameter for parameter in parameters.split(", ") if parameter not in ("", "...")]
    now = inspect.signature(getattr(found, name)).parameters.values()
    required = [
        each.name
        for each in now
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    takes = [each.name for each in now]
    same = takes == given if "..." not in parameters else takes[: len(given)] == given and set(required) <= set(given)
    return None if same else f"deepspeed.{owner}.{name} takes ({', '.join(takes)}), not ({parameters})"


def test_deepspeed_has_the_internals() -> None:
    changes = [problem for owner, match in listed() if (problem := change(owner, match))]
    assert not changes, "\n".join([f"DeepSpeed {version('deepspeed')} differs from {TESTED[-1]}:", *changes])


@pytest.mark.parametrize(
    ("owner", "names", "problem"),
    [
        ("runtime.gone", "name", "runtime.gone does not exist"),
        ("runtime.engine.Gone", "name", "runtime.engine.Gone does not exist"),
        ("runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3", "gone", "neither has nor sets gone"),
        ("runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3", "gone(self)", "has no function gone"),
        ("runtime.utils", "partition_balanced(weights)", r"takes \(weights, num_parts\), not \(weights\)"),
        ("runtime.utils", "partition_balanced(weights, ...)", r"takes \(weights, num_parts\)"),
    ],
)
def test_a_change_is_named(owner: str, names: str, problem: str) -> None:
    match = NAME.fullmatch(names)
    assert match is not None and re.search(problem, str(change(owner, match)))


def test_the_tested_versions_are_the_supported_ones() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"deepspeed>={TESTED[0]}" in dependencies
    pinned = (ROOT / "requirements.txt").read_text().splitlines()
    assert Requirement(next(line for line in pinned if line.startswith("deepspeed"))) == Requirement(
        f"deepspeed=={TESTED[-1]}"
    )
    assert {read_in for *_, read_in in INTERNALS} <= {TESTED[-1]}, "read the other entries in the new version too"


def test_every_name_that_the_module_uses_is_in_the_table() -> None:
    code, names = "".join((ROOT / home).read_text() for home in HOMES), {match["name"] for _, match in listed()}
    objects = {"optimizer", "engine", "zero", "parameter", "mapping", "inner", "outer", "parallel_state_sp"}
    attributes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if ast.unparse(node.value).partition(".")[0] in objects}
    assert used - names <= {"param_groups", *dir(torch.nn.Parameter)}
    elsewhere = {"__init__", "forward", "main", "all_reduce", "cur_scale", "grad_allreduce"}
    assert all(re.search(rf"\b{name}\b", code) for name in names - elsewhere), "the table has a name that is not used"


def uses(code: str, in_engine: bool) -> Iterator[str]:
    """Yield the uses of DeepSpeed beyond its public interface. Only files of training/engine have its objects."""
    names = {match["name"] for _, match in listed()} - OF_OTHERS
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (
                f"line {node.lineno}: {each}"
                for each in modules
                if str(each).startswith("deepspeed") and each not in PUBLIC_MODULES
            )
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            private = in_engine and node.attr.startswith("_") and owner not in ("self", "super()", "torch", "os")
            beyond = in_engine and owner in PUBLIC and node.attr not in PUBLIC[owner]
            if private or beyond or (node.attr in names and owner != "internals"):
                yield f"line {node.lineno}: {owner}.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            by_name = getattr(node.args[1], "value", None) in names
            yield from [f"line {node.lineno}: {ast.unparse(node)}"] * by_name


def test_one_module_uses_internals_of_deepspeed() -> None:
    files = [file.relative_to(ROOT) for folder in ("megatron_coca", "tools") for file in (ROOT / folder).rglob("*.py")]
    found = {file: list(uses((ROOT / file).read_text(), file.parent == ENGINE)) for file in files}
    assert sum(len(found.pop(home)) for home in HOMES) > 30, "the check sees the uses of the two modules"
    assert not {str(file): lines for file, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line",
    [
        "from deepspeed.runtime.utils import partition_balanced",
        "import deepspeed.comm as dist",
        "deepspeed.ops.builder()",
        "self._engine.fwd_outputs",
        "self._engine.optimizer.cpu_offload",
        "self._engine.optimizer._global_grad_norm",
        "optimizer._private()",
        "parameter.ds_numel",
        "getattr(parameter, 'ds_shape', None)",
    ],
)
def test_the_check_can_fail(line: str) -> None:
    assert list(uses(line, in_engine=True))
