"""Position methods from a file of the user: the example of docs/own_methods.md, from training to an export."""

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_coca import build_model, load_config, load_model, methods, register
from megatron_coca.attention.positions.bias import AlibiBias, BiasSource
from megatron_coca.checkpoints.exporting import export, export_neox
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.huggingface.write import MODELLING_FILE
from megatron_coca.config import ConfigError, load_saved_config
from tests.checkpoint_files import write_checkpoint

ROOT = Path(__file__).parents[3]
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 64}
SHAPE |= {"init_method_std": 0.2, "output_layer_init_method": "normal"}
SLOW = {"pos_emb": "coca", "rope_scaling": {"rope_type": "divide_slow", "factor": 4.0, "least": 0.5}}
ROOT_BIAS = {"pos_emb": "root"}


@pytest.fixture
def example(tmp_path: Path) -> Iterator[Path]:
    """The file of the page; what it declares is forgotten afterwards."""
    before = {key: dict(table) for key, table in methods.TABLES.items()}
    page = (ROOT / "docs/own_methods.md").read_text()
    (source,) = re.findall(r'```python\n(""".*?)```', page, re.DOTALL)
    (tmp_path / "halved.py").write_text(source)
    yield tmp_path / "halved.py"
    for key, table in before.items():
        methods.TABLES[key].clear()
        methods.TABLES[key].update(table)
    for name in [name for name in sys.modules if name.startswith("megatron_coca_imports.")]:
        del sys.modules[name]


def configured(example: Path, keys: dict[str, Any]) -> Any:
    run = example.parent / "run.yml"
    run.write_text("imports: [halved.py]\n")
    return load_config([run], SHAPE | keys)


@pytest.mark.parametrize("keys", [SLOW, ROOT_BIAS], ids=["extension", "bias"])
def test_it_computes_its_formula_trains_and_decodes(example: Path, keys: dict[str, Any]) -> None:
    config = configured(example, keys)
    model = build_model(config)
    ids = torch.randint(64, (2, 50), generator=torch.Generator().manual_seed(0))
    model.loss(model.hidden_states(ids[:, :-1]), ids[:, 1:]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    dense = build_model(config.override({"attention_backend": "reference"})).eval()
    dense.load_state_dict(model.state_dict())
    with torch.no_grad():
        full, cache = model(ids), model.new_cache(50)
        torch.testing.assert_close(full, dense(ids), rtol=1e-4, atol=1e-5)
        decoded = torch.cat([model(part, cache=cache) for part in ids.split([20] + [1] * 30, dim=1)], dim=1)
        torch.testing.assert_close(decoded, full, rtol=1e-4, atol=1e-5)
        documents = (torch.arange(50) >= 21).long().expand(2, -1)
        packed = model(ids, documents=documents)
        torch.testing.assert_close(packed[:, 21:], model(ids[:, 21:]), rtol=1e-4, atol=1e-5)
        plain = {"rope_scaling": None} if "rope_scaling" in keys else {"pos_emb": "none"}
        other = build_model(config.override(plain)).eval()
        other.load_state_dict(model.state_dict())
        assert not torch.allclose(other(ids), full, atol=1e-4), "the method has an effect"


def test_extensions_of_ones_own_read_only_the_base(example: Path) -> None:
    with pytest.raises(ConfigError, match="rope_id is not .*divide_slow of a file"):
        configured(example, SLOW | {"rotary_frequencies": "rope_id"})


def test_frequencies_of_ones_own() -> None:
    before = dict(methods.TABLES["rotary_frequencies"])
    try:
        tenth = methods.TrainingFrequencies("tenth", "tenth", "here", rule="0.1 * 4^(-2j/d)")
        register(tenth, lambda dim, options, length: (0.1, 4.0))
        config = load_config([], SHAPE | {"pos_emb": "coca", "rotary_frequencies": "tenth"})
        rotary = build_model(config).positions.method.rotary
    finally:
        methods.TABLES["rotary_frequencies"].clear()
        methods.TABLES["rotary_frequencies"].update(before)
    assert rotary is not None
    torch.testing.assert_close(rotary.inverse_frequencies(9), 0.1 * 4.0 ** (-torch.arange(4, dtype=torch.float64) / 4))


def test_a_bias_of_ones_own_gets_the_defaults_of_its_options() -> None:
    before, given = dict(methods.TABLES["pos_emb"]), []
    slope = methods.Option("slope", "positive", "Slope.", default=2.0)
    declared = methods.PositionEmbedding("steep", "steep", "here", bias="-s r", biased=True, options=(slope,))
    try:
        register(declared, lambda heads, width, options: given.append(options) or BiasSource())
        for keys in ({}, {"pos_emb_options": {"slope": 3.0}}):
            build_model(load_config([], SHAPE | {"pos_emb": "steep"} | keys))
    finally:
        methods.TABLES["pos_emb"].clear()
        methods.TABLES["pos_emb"].update(before)
    assert [options["slope"] for options in given] == [2.0, 3.0]


def test_a_gate_of_ones_own() -> None:
    """A gate that is always 1/2 lowers scores by ln 2 for every token between, which is ALiBi with one slope."""
    before = dict(methods.TABLES["forgetting_gate"])
    try:
        register(methods.ForgettingGate("half", "half", "here"), lambda x: torch.full_like(x, -math.log(2)))
        model = build_model(load_config([], SHAPE | {"pos_emb": "none", "forgetting_gate": "half"})).double().eval()
    finally:
        methods.TABLES["forgetting_gate"].clear()
        methods.TABLES["forgetting_gate"].update(before)
    linear = build_model(load_config([], SHAPE | {"pos_emb": "alibi", "num_attention_heads": 4})).double().eval()
    linear.load_state_dict(model.state_dict(), strict=False)
    slopes = AlibiBias((math.log(2),) * 4)
    linear.positions.method = replace(linear.positions.method, bias=BiasSource("linear", fixed=slopes))
    ids = torch.randint(64, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), linear(ids), rtol=1e-9, atol=1e-9)


def test_the_frequencies_are_those_of_the_file(example: Path) -> None:
    method = build_model(configured(example, SLOW)).methods["global"]
    theta = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    slow = theta * 16 / (2 * torch.pi) < 0.5
    assert slow.any() and not slow.all()
    torch.testing.assert_close(method.rotary.inverse_frequencies(99), torch.where(slow, theta / 4, theta))


def test_a_checkpoint_needs_the_user_to_name_its_file(example: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = configured(example, SLOW)
    model = build_model(config).eval()
    saved = write_checkpoint(example.parent / "saved", config, model.state_dict(), None)
    ids, named = torch.randint(64, (1, 40)), {"imports": [str(example)]}
    with pytest.raises(ConfigError, match=r"config.yml:\d+: .*halved.py: not run, .*imports=\[FILE\]"):
        load_model(saved)
    torch.testing.assert_close(load_model(saved, named)(ids), model(ids), rtol=0, atol=0)
    example.write_text(example.read_text() + "\n# a comment changes nothing\n")
    moved = example.rename(example.parent / "moved.py")
    torch.testing.assert_close(load_model(saved, {"imports": [str(moved)]})(ids), model(ids), rtol=0, atol=0)
    assert not caplog.records
    moved.write_text(moved.read_text() + "\nchanged = True\n")
    torch.testing.assert_close(load_model(saved, {"imports": [str(moved)]})(ids), model(ids), rtol=0, atol=0)
    assert "moved.py#sha256=" in caplog.text and "not the file that the weights" in caplog.text
    with pytest.raises(ConfigError, match="not the file that the weights .*; restore it"):
        load_saved_config(saved / "global_step7" / "config.yml", {"imports": [str(moved)]}, same=True)


@pytest.mark.parametrize(
    ("keys", "named", "reason"),
    [
        (SLOW, "rope_scaling divide_slow", "declared outside megatron_coca"),
        (ROOT_BIAS, "pos_emb root", "GPT-NeoX has no such bias"),
    ],
    ids=["extension", "bias"],
)
def test_exports_contain_it_or_name_it_in_an_error(
    example: Path, keys: dict[str, Any], named: str, reason: str
) -> None:
    """Logits of what is carried are compared in tests/parity/exports/test_modelling_file.py."""
    config = configured(example, keys)
    saved, own = write_checkpoint(example.parent / "saved", config, tokenizer=None), {"imports": [str(example)]}
    with pytest.raises(CheckpointError, match=f"{named}: {reason}"):
        export_neox(saved, example.parent / "exported", own)
    assert not (example.parent / "exported").exists()
    text = (export(saved, example.parent / "exported", own).folder / MODELLING_FILE).read_text()
    assert f'"{named.split()[1]}"] = {"root_bias" if "root" in named else "divide_slow"}\n' in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "divide_slow"}}, "rope_type divide_slow needs factor"),
        (
            {"rope_scaling": {"rope_type": "divide_slow", "factor": 0.5}},
            "rope_scaling.factor: expected a value greater",
        ),
        ({"rope_scaling": {"rope_type": "divide_slo", "factor": 2.0}}, "did you mean `divide_slow`"),
        ({"pos_emb": "root"}, "divide_slow is not supported .*pos_emb root"),
        ({"pos_emb": "rooot"}, "did you mean `root`"),
        ({"imports": ["absent.py"]}, "imports: .*absent.py: No such file"),
    ],
)
def test_mistakes_are_named(example: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(example, SLOW | change)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def (", "SyntaxError"),
        (
            "from megatron_coca.methods import LogitScaling, register\n"
            "register(LogitScaling('log_n', '', ''), lambda m, length: m)",
            "log_n is a built-in choice",
        ),
    ],
)
def test_a_file_that_fails_is_named(example: Path, source: str, message: str) -> None:
    example.write_text(source)
    with pytest.raises(ConfigError, match=f"imports: {example}: .*{message}"):
        configured(example, {})
