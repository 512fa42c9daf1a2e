"""The modelling file is assembled from the formulas, including the user's, and imports nothing of this package."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_coca import load_config, load_model, methods
from megatron_coca.attention.build import build_method
from megatron_coca.attention.positions import bias, distance_maps, forms, frequencies, logit_scalings
from megatron_coca.checkpoints import CheckpointError
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.huggingface.model_source import modelling_file
from megatron_coca.checkpoints.huggingface.write import MODELLING_FILE
from tests.conftest import ROOT
from tests.parity.exported import (
    GROUPED,
    NEOX,
    SHAPE,
    TRAINED,
    modules_cache,
    names_in_the_file,
    random_checkpoint,
    remote,
    tokens,
)

pytestmark = pytest.mark.usefixtures("modules_cache")
__all__ = ["modules_cache"]

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def test_it_stands_alone(tmp_path: Path) -> None:
    """All names are defined, once, and only torch and transformers are imported beside Python's own modules."""
    file = tmp_path / MODELLING_FILE
    file.write_text(modelling_file())
    checks = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9,B", str(file)]
    assert subprocess.run(checks, capture_output=True, text=True, check=False).stdout.strip() == "All checks passed!"
    body = ast.parse(file.read_text()).body
    imported = {node.module or "" for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.ImportFrom)}
    imported |= {
        alias.name for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.Import) for alias in node.names
    }
    others = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert others == {"torch", "transformers", "typing_extensions"}
    defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert len(defined) == len(set(defined))


@pytest.mark.slow
def test_it_needs_no_other_import_before() -> None:
    """A fresh process that imports only this module."""
    code = "from megatron_coca.checkpoints.huggingface.model_source import modelling_file; print(modelling_file())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == modelling_file() + "\n"


def test_its_formulas_are_the_sources(tmp_path: Path) -> None:
    """Each row of a table is a function whose source is in the file, word by word."""
    text, names = modelling_file(), names_in_the_file(tmp_path)
    tables = (frequencies.EXTENSIONS, distance_maps.DISTANCE_MAPS, logit_scalings.LOGIT_SCALINGS)
    written = [compute for table in tables for compute in table.values()]
    for compute in (each for each in written if each.__name__ != "<lambda>"):  # which the table itself contains
        source = Path(compute.__code__.co_filename).read_text()
        assert ast.unparse(_definition(text, compute.__name__)) == ast.unparse(_definition(source, compute.__name__))
    ours = {"SCORE_FORMS": forms.SCORE_FORMS, "BIASES": bias.BIASES, "LOGIT_SCALINGS": logit_scalings.LOGIT_SCALINGS}
    ours |= {"EXTENSIONS": frequencies.EXTENSIONS, "DISTANCE_MAPS": distance_maps.DISTANCE_MAPS}
    assert all(names[name].keys() == table.keys() for name, table in ours.items())


def _definition(source: str, name: str) -> ast.FunctionDef:
    (found,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    return found


# Options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "ntk_mixed", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 1.0, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "beta_fast": 8.0},
        {"rope_type": "dynamic_yarn", "original_max_position_embeddings": 16},
        {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "proportional", "proportion": 0.5},
        {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]},
    ],
    ids=str,
)
def test_options_given_when_it_is_loaded_have_our_defaults(scaling: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", **GROUPED, pos_emb="coca_strict")
    folder = export(checkpoint, tmp_path / "exported").folder
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config.position["rope_scaling"] = scaling
    theirs = AutoModelForCausalLM.from_pretrained(folder, config=config, trust_remote_code=True).eval()
    ours = load_model(checkpoint, {"rope_scaling": scaling})
    with torch.no_grad():
        for length in (TRAINED, 3 * TRAINED):
            torch.testing.assert_close(theirs(tokens(length)).logits, ours(tokens(length)), **CLOSE)


REROPE = {"pos_emb": "coca", "relative_positions": {"type": "rerope"}}


@torch.no_grad()
@pytest.mark.parametrize(
    ("keys", "attention", "error"),
    [
        ({"pos_emb": "coca"}, "sdpa", 1e-10),
        ({"pos_emb": "rpe"}, "sdpa", 1e-10),
        ({"pos_emb": "alibi"}, "sdpa", 1e-10),
        ({"pos_emb": "alibi"}, "eager", 1e-5),  # transformers' function computes the softmax in float32
        (REROPE, "sdpa", 1e-10),
        (REROPE, "eager", 1e-10),
    ],
    ids=str,
)
def test_float64(keys: dict[str, Any], attention: str, error: float, tmp_path: Path) -> None:
    """Also rows with padding."""
    checkpoint = random_checkpoint(tmp_path / "run", **NEOX | keys)
    theirs = remote(checkpoint, tmp_path / "exported", attention=attention, dtype=torch.float64)
    ours = load_model(checkpoint, {"attention_backend": "reference"}).double()
    batch = tokens(70)
    torch.testing.assert_close(theirs(batch).logits, ours(batch), rtol=0, atol=error)
    padded = torch.nn.functional.pad(batch, (9, 0), value=17)
    mask = torch.ones_like(padded)
    mask[:, :9] = 0
    torch.testing.assert_close(theirs(padded, attention_mask=mask).logits[:, 9:], ours(batch), rtol=0, atol=error)


# Methods from outside -------------------------------------------------------------------------------------------------

IMPORTS = """
import math

import torch

from megatron_coca.attention.positions.bias import fixed_bias
from megatron_coca.attention.positions.distance_maps import Band
from megatron_coca.attention.positions.forms import ScoreForm, rotate
from megatron_coca.attention.positions.frequencies import geometric
from megatron_coca.methods import DistanceMap, FrequencyExtension, LogitScaling, Option, PositionEmbedding, register

FACTOR = Option("factor", "factor", "Divisor.", default=3.0)
"""
EXTENSION = """
HALF = 0.5
\"\"\"A constant beside the formula.\"\"\"


def _fewer(theta):
    return theta < math.sqrt(HALF) / 10


def mine(rotary, length):
    theta = geometric(rotary.dim, rotary.base)
    return torch.where(_fewer(theta), theta / rotary.scaling.factor, theta)


register(FrequencyExtension("mine", "mine", "a test", rule="", options=(FACTOR,)), mine)
"""
MAP = """
def mine(options, training_length):
    def key(positions, first):
        return (positions / options["factor"]).floor()

    w = options["window"]
    return Band(high=w), Band(low=w, query_positions=lambda m, first: key(m, first) + w, key_positions=key)


window = Option("window", "count", "w.", by_length=lambda length, options: length // 3)
register(DistanceMap("mine", "mine", "a test", rule="", options=(FACTOR, window)), mine)
"""
SCALING = """
def mine(positions, training_length):
    return 1 + (positions / training_length).sqrt()


register(LogitScaling("mine", "mine", "a test"), mine)
"""
BIAS = """
def fall(distance, heads):
    slopes = torch.arange(1, heads + 1).to(distance) / heads
    return -slopes.view(-1, *[1] * distance.dim()) * distance.sqrt()


mine = lambda heads, head_dim, options: fixed_bias("mine", fall, heads)
register(PositionEmbedding("mine", "mine", "a test", biased=True), mine)
"""
FORM = """
def positive(q, tables):
    return rotate(q.relu(), tables)


MINE = ScoreForm(query=positive, key=rotate)
register(PositionEmbedding("mine", "mine", "a test", rotary=True), MINE)
"""
OUTSIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "extension": (EXTENSION, {"pos_emb": "rotary", "rope_scaling": {"rope_type": "mine"}}),
    "map": (MAP, {"pos_emb": "coca_strict", "relative_positions": {"type": "mine"}}),
    "logit scaling": (SCALING, {"pos_emb": "coca", "logit_scaling": "mine"}),
    "bias": (BIAS, {"pos_emb": "mine"}),
    "form": (FORM, {"pos_emb": "mine"}),
}


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What a test declares is forgotten afterwards."""
    before = {key: dict(table) for key, table in methods.TABLES.items()}
    yield
    for key, table in before.items():
        methods.TABLES[key].clear()
        methods.TABLES[key].update(table)
    for name in [name for name in sys.modules if name.startswith("megatron_coca_imports.")]:
        del sys.modules[name]


def of_the_user(source: str, keys: dict[str, Any], tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(IMPORTS + source)
    return random_checkpoint(tmp_path / "run", **GROUPED | keys | {"imports": [str(file)]})


@torch.no_grad()
@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("kind", OUTSIDE)
def test_methods_from_outside_are_carried(kind: str, tmp_path: Path) -> None:
    """In one pass and in steps with the cache; the file names nothing of this package and not the user's file."""
    checkpoint = of_the_user(*OUTSIDE[kind], tmp_path)
    own = f"imports=[{tmp_path / 'mine.py'}]"
    theirs, ours = remote(checkpoint, tmp_path / "exported", own), load_model(checkpoint, [own])
    batch = tokens(3 * TRAINED)
    expected = ours(batch)
    torch.testing.assert_close(theirs(batch).logits, expected, **CLOSE)
    cache = theirs(batch[:, :50], use_cache=True).past_key_values
    step = theirs(batch[:, 50:], past_key_values=cache).logits
    torch.testing.assert_close(step, expected[:, 50:], **CLOSE)
    text = (tmp_path / "exported" / MODELLING_FILE).read_text()
    assert not re.search(r"^\s*(from|import) megatron_coca", text, re.MULTILINE)
    assert "mine.py" not in text and '"mine"' not in modelling_file()
    plain = load_config([], SHAPE | GROUPED | {"pos_emb": "rotary"})
    assert build_method(plain.position, plain.model).name == "rotary"


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (EXTENSION.replace("rule", "huggingface='only here', rule"), "rope_scaling mine: only here"),
        (
            EXTENSION.replace("rule", "huggingface='stock', rule"),
            "rope_scaling mine: declared outside megatron_coca",
        ),
        (
            EXTENSION.replace(", mine)", ", lambda rotary, length: mine(rotary, length))"),
            "not defined at the top level",
        ),
        (
            EXTENSION.replace("def _fewer", "def less").replace(
                "\n\n\ndef mine", "\n\nglobals()['_fewer'] = less\n\n\ndef mine"
            ),
            "no definition of _fewer at the top level",
        ),
        (EXTENSION.replace("_fewer", "_theta"), "defines another _theta; rename it"),
        (
            EXTENSION.replace("math.sqrt", "np.sqrt").replace("HALF =", "import numpy as np\nHALF ="),
            "imports np, which",
        ),
        (
            EXTENSION.replace("geometric(", "frequencies.geometric(").replace(
                "HALF =", "from megatron_coca.attention.positions import frequencies\nHALF ="
            ),
            "imports frequencies, which is not part",
        ),
    ],
    ids=["reason", "stock", "lambda", "undefined", "clash", "library", "module"],
)
def test_formulas_that_no_file_can_contain_are_an_error(source: str, message: str, tmp_path: Path) -> None:
    checkpoint = of_the_user(source, OUTSIDE["extension"][1], tmp_path)
    with pytest.raises(CheckpointError, match=message):
        export(checkpoint, tmp_path / "exported", {"imports": [tmp_path / "mine.py"]})
    assert not (tmp_path / "exported").exists()


@pytest.mark.usefixtures("forgotten")
def test_config_has_every_option_resolved(tmp_path: Path) -> None:
    checkpoint = of_the_user(*OUTSIDE["map"], tmp_path)
    folder = export(checkpoint, tmp_path / "exported", {"imports": [tmp_path / "mine.py"]}).folder
    position = json.loads((folder / "config.json").read_text())["position"]
    assert position["relative_positions"] == {"type": "mine", "factor": 3.0, "window": TRAINED // 3}
