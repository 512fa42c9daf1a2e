"""Rows of families: their names are those of transformers and of our configuration, and a mistake names the row."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, StableLmConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron_coca import load_model
from megatron_coca.checkpoints import CheckpointError
from megatron_coca.checkpoints.huggingface import families, weight_map
from megatron_coca.checkpoints.huggingface.families import FAMILIES, llama_like, row_name
from megatron_coca.checkpoints.huggingface.families.parts import defaults, keys, tables
from megatron_coca.checkpoints.huggingface.families.parts.row_check import check_row
from megatron_coca.checkpoints.huggingface.unread_keys import keys_of_class
from tests.unit.checkpoints.huggingface.test_new_family import SHAPE, row_of_the_guide

OLDER = {("mpt", "attn_config.softmax_scale"), ("bloom", "seq_length")}
"""Keys that only older folders have, or a class in a nested mapping."""
COMPUTED = {("hyperclovax", "attention_multiplier")}
"""Keys with a default that the class computes from other keys."""

CLASSES = frozenset(dir(transformers))  # takes half a second


def names(kind: str) -> set[str]:
    """The keys of config.json that a row reads."""
    family = FAMILIES[kind]
    found = {*family.keys, *family.first, *filter(None, (*family.names.values(), family.activation[0]))}
    return {name for name in found if (kind, name) not in OLDER}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_row_has_the_names_and_defaults_of_its_class(kind: str) -> None:
    family, known = FAMILIES[kind], keys_of_class(kind)
    if known is None:  # a model_type of folders with code of their own, which LLaMA's class may compute
        assert family.architecture in ("LlamaForCausalLM", "")
        return
    assert family.architecture in CLASSES, f"{row_name(kind)}: transformers has no {family.architecture}"
    absent = names(kind) - known.names
    assert not absent, f"{row_name(kind)}: {known.reader} has no key {', '.join(sorted(absent))}"
    defaults, (key, activation) = CONFIG_MAPPING[kind](), family.activation
    wanted = {name: default for name, (_, default) in family.keys.items() if (kind, name) not in OLDER | COMPUTED}
    wanted |= {key: activation} if key is not None else {}
    share = (getattr(defaults, "rope_parameters", None) or {}).get("partial_rotary_factor")
    assert family.by_type or (share or 1.0) == (family.share or 1.0), (
        f"{row_name(kind)}: share is {share} by default in {known.reader}"
    )
    written = defaults.to_dict()
    rope = written.get("rope_parameters") or {}
    extended = rope.get("rope_type", "default") != "default"
    assert extended or rope.get("rope_theta") in (None, family.rope), (
        f"{row_name(kind)}: rope is {rope['rope_theta']} by default in {known.reader}"
    )
    heads, width = written.get("num_attention_heads"), written.get("head_dim")
    equal = "head_dim" in family.harmless or (heads is not None and width == defaults.hidden_size // heads)
    assert width == family.head_dim or (family.head_dim is None and equal), (
        f"{row_name(kind)}: head_dim is {width} by default in {known.reader}"
    )
    differing = [f"{name} is {getattr(defaults, name)!r}" for name in wanted if getattr(defaults, name) != wanted[name]]
    assert not differing, f"{row_name(kind)}: in {known.reader}, {', '.join(differing)} by default"


def test_the_table_of_helpers_has_every_helper() -> None:
    rows = re.findall(r"^\|[^|]*\|(.*?)\| `([\w/]+\.py)` \|$", families.__doc__ or "", re.MULTILINE)
    listed: dict[str, set[str]] = {}
    for helpers, file in rows:
        listed.setdefault(Path(file).stem, set()).update(re.findall(r"`(\w+)`", helpers))
    for module in (defaults, tables, keys, weight_map):
        name = module.__name__.rpartition(".")[2]
        defined = _defined(module)
        assert listed[name] <= defined, f"{name}.py defines them"
        whole = module in (defaults, tables)
        helpers = {each for each in defined if whole or _chooses_layers(module, each)}
        assert helpers - {"Json", "Rows"} <= listed[name], "families/__init__.py lists them"


def _defined(module: ModuleType) -> set[str]:
    """Public names that a module defines itself."""
    found: set[str] = set()
    for node in ast.parse(inspect.getsource(module)).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Assign(targets=targets):
                found |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    return {name for name in found if not name.startswith("_")}


def _chooses_layers(module: ModuleType, name: str) -> bool:
    return isinstance(getattr(module, name, None), keys.Windows | keys.Rotating)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("stablelm")
    AutoModelForCausalLM.from_config(StableLmConfig(**SHAPE, use_qkv_bias=True)).save_pretrained(folder)
    return folder


@pytest.fixture
def _restored() -> Iterator[None]:
    before = FAMILIES["stablelm"]
    yield
    FAMILIES["stablelm"] = before


ROW = "row 'stablelm' of families/llama_like.py"
NORM = '"norm": "layernorm"'
MISTAKES: dict[str, tuple[str, str, str]] = {
    "no function": (
        "rows_of(with_norm_bias(like_llama(PRE)))",
        "with_norm_bias(like_llama(PRE))",
        "rows: expected a function of the model, got a table; put it into rows_of",
    ),
    "no default": (
        '("use_bias_in_qkv", False)',
        '"use_bias_in_qkv"',
        "keys: use_qkv_bias: expected (\"our key\", default of the class), got 'use_bias_in_qkv'; correct it",
    ),
    "our key": (
        "use_bias_in_qkv",
        "use_bias_in_qvk",
        "keys: use_qkv_bias: use_bias_in_qvk is not a key of docs/config.md; did you mean `use_bias_in_qkv`?",
    ),
    "fixed key": (
        "use_bias_in_norms",
        "use_bias_in_nroms",
        "fixed: use_bias_in_nroms is not a key of docs/config.md; did you mean `use_bias_in_norms`?",
    ),
    "activation": (
        "share=0.25",
        'share=0.25, activation=("hidden_act", "sillu")',
        "activation: hidden_act: 'sillu' is not one of silu | swish | gelu | ",
    ),
    "name of a common key": (
        "share=0.25",
        'share=0.25, names={"haed_dim": None}',
        "names: haed_dim is not a common key; did you mean `head_dim`?",
    ),
    "first key": (
        "share=0.25",
        'share=0.25, first={"n_embed": "hiden_size"}',
        "first: hiden_size is not a common key; did you mean `hidden_size`?",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_row_that_describes_no_model_is_an_error_when_it_is_loaded(mistake: str) -> None:
    right, wrong, message = MISTAKES[mistake]
    check_row(ROW, row_of_the_guide()[1])
    with pytest.raises(ValueError, match="^" + re.escape(f"{ROW}: {message}")):
        check_row(ROW, row_of_the_guide(right, wrong)[1])


def test_a_name_that_no_row_has_cannot_be_renamed() -> None:
    with pytest.raises(ValueError, match="renamed: no weight name contains 'out_proj'"):
        tables.renamed(llama_like.like_llama(llama_like.PRE), {"out_proj": "dense"})


FOLDERS: dict[str, tuple[str, str, str]] = {
    "a key of the class": (
        ', "use_qkv_bias": ("use_bias_in_qkv", False)',
        "",
        "use_qkv_bias: not supported and .*--ignore-key use_qkv_bias; to support it, add it to " + ROW,
    ),
    "a value": (
        NORM,
        NORM.replace("layernorm", "layernrom"),
        rf"norm \(fixed by {ROW}\): `layernrom` is not one of .*did you mean `layernorm`",
    ),
    "names of weights": (
        "with_norm_bias(like_llama(PRE))",
        'renamed(with_norm_bias(like_llama(PRE)), {"o_proj": "dense"})',
        r"has weights with other names .model.layers.0.self_attn.dense.weight, .* than the folder "
        rf".model.layers.0.self_attn.o_proj.weight, .*; correct config.json, or {ROW}",
    ),
    "the layout of the norms": (
        "PRE",
        "POST",
        r"has weights with other names .model.layers.0.post_feedforward_layernorm.weight.* than the folder "
        rf".model.layers.0.input_layernorm.*; correct config.json, or {ROW}",
    ),
    "a bias": (
        ', "use_bias_in_norms": True',
        "",
        "do not fit the model: unexpected blocks.0.input_layernorm.bias; .*; correct config.json, or "
        rf"{ROW} .biases follow from use_bias_in_norms, ",
    ),
    "a row of a bias": (
        "with_norm_bias(like_llama(PRE))",
        "like_llama(PRE)",
        rf"does not have .model.norm.bias.; correct config.json, or {ROW}",
    ),
}


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("mistake", FOLDERS)
def test_a_row_that_does_not_fit_its_class_is_named(mistake: str, source: Path) -> None:
    right, wrong, message = FOLDERS[mistake]
    families.FAMILIES["stablelm"] = row_of_the_guide(right, wrong)[1]
    with pytest.raises(CheckpointError, match=message):
        load_model(source)
