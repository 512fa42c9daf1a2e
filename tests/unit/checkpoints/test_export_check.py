"""Every export ends with a comparison with its source; one that differs leaves nothing."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from megatron_coca import load_model
from megatron_coca.checkpoints import CheckpointError, export_check, open_checkpoint
from megatron_coca.checkpoints.exporting import export, export_neox
from megatron_coca.checkpoints.huggingface import transformers_check
from megatron_coca.checkpoints.huggingface import write as huggingface_export
from megatron_coca.checkpoints.huggingface.write import EXPORTERS, OURS
from megatron_coca.checkpoints.neox import write as neox
from megatron_coca.checkpoints.weights import Weights
from megatron_coca.config import Config
from tests.parity.exported import GROUPED, LLAMA, NEOX, TRAINED, modules_cache, random_checkpoint, tokens

pytestmark = pytest.mark.usefixtures("modules_cache")
__all__ = ["modules_cache"]

WINDOW, CHUNK = {"sliding_window_width": 6}, {"attention_chunk_size": 8}


def types(name: str, own: dict[str, Any]) -> dict[str, Any]:
    return {"attention_config": [[["global", name], 1]], "layer_types": {name: own}}


LIMITS: dict[str, dict[str, Any]] = {
    "no window in one type": {"pos_emb": "coca"} | WINDOW | types("full", {"sliding_window_width": None}),
    "no chunks in one type": CHUNK | types("full", {"attention_chunk_size": None}),
    "no window with ALiBi": {"pos_emb": "alibi"} | WINDOW | types("full", {"sliding_window_width": None}),
    "chunks in place of a window": WINDOW | types("chunked", {"sliding_window_width": None} | CHUNK),
    "a window in place of chunks": CHUNK | types("sliding", {"attention_chunk_size": None} | WINDOW),
}


@pytest.mark.parametrize("case", LIMITS)
@torch.no_grad()
def test_a_limit_that_a_type_of_layers_takes_away(case: str, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", **GROUPED | LIMITS[case])
    done = export(checkpoint, tmp_path / "exported")
    assert done.remote and done.compared.startswith("transformers ")
    theirs = AutoModelForCausalLM.from_pretrained(done.folder, trust_remote_code=True).eval()
    expected = load_model(checkpoint)(tokens(TRAINED))
    torch.testing.assert_close(theirs(tokens(TRAINED)).logits, expected, rtol=1e-5, atol=1e-5)
    assert (load_model(done.folder)(tokens(TRAINED)) == expected).all()


# Faults of an exporter ------------------------------------------------------------------------------------------------

Describe = Callable[..., dict[str, dict[str, Any]]]


def with_keys(**changes: Any) -> Callable[[Describe], Describe]:
    """An exporter that writes other values into config.json; `section__key` is a key of a section."""

    def changed(describe: Describe) -> Describe:
        def wrong(config: Config, *given: Any) -> dict[str, dict[str, Any]]:
            contents = describe(config, *given)
            for name, value in changes.items():
                *sections, key = name.split("__")
                place = contents["config.json"]
                for section in sections:
                    place = place[section]
                place[key] = value
            return contents

        return wrong

    return changed


YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
TIED = {"no_weight_tying": False}
COCA = GROUPED | {"pos_emb": "coca", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
WINDOWED = GROUPED | LIMITS["no window in one type"]
WRONG: dict[str, tuple[dict[str, Any], Callable[[Describe], Describe], str]] = {
    "the limit of a type": (
        WINDOWED,
        with_keys(position__layer_types__full__sliding_window_width=6),
        "window_width is 6",
    ),
    "tied weights": (
        LLAMA | TIED,
        with_keys(tie_word_embeddings=False),
        "cannot read the export.*lm_head|no_weight_tying is",
    ),
    "untied weights": (
        LLAMA,
        with_keys(tie_word_embeddings=True),
        "cannot read the export.*but config.json ties these",
    ),
    "a factor": (
        LLAMA | YARN,
        with_keys(rope_parameters__factor=8.0, rope_scaling__factor=8.0),
        r"rope_scaling.factor is 8.0, not 4.0",
    ),
    "one spelling": (LLAMA | YARN, with_keys(rope_scaling__factor=8.0), "rope_scaling .* contradicts rope_parameters"),
    "a factor of the file": (
        COCA,
        with_keys(position__rope_scaling__factor=3.0),
        "rope_scaling.factor is 3.0, not 2.0",
    ),
    "heads": (LLAMA, with_keys(num_attention_heads=2, num_key_value_heads=2, head_dim=16), "num_attention_heads is 2"),
    "key heads": (GROUPED, with_keys(num_key_value_heads=4), "cannot read the export: .*k_proj"),
}


@pytest.mark.parametrize("case", WRONG)
def test_another_configuration_is_no_export(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, change, problem = WRONG[case]
    checkpoint = random_checkpoint(tmp_path / "run", **keys)
    monkeypatch.setattr(huggingface_export, "describe", change(huggingface_export.describe))
    with pytest.raises(CheckpointError, match=f"(?s)export: does not match the source: .*{problem}"):
        export(checkpoint, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "case", [case for case in WRONG if case != "untied weights"]
)  # transformers 5 takes the head that is there
def test_logits_find_it_too(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What our import would read as it was written, transformers computes."""
    keys, change, _ = WRONG[case]
    checkpoint = random_checkpoint(tmp_path / "run", **keys)
    monkeypatch.setattr(huggingface_export, "describe", change(huggingface_export.describe))
    monkeypatch.setattr(huggingface_export, "check_folder", lambda *given: None)
    if case == "tied weights":  # transformers draws a head
        monkeypatch.setattr(torch.nn.init, "normal_", lambda tensor, *given, **named: tensor.fill_(0.01))
    with pytest.raises(CheckpointError, match="source: transformers .* (logits that differ|load)"):
        export(checkpoint, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_formula_of_the_modelling_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", **COCA)
    text = huggingface_export.modelling_file(())
    changed = text.replace("rotary.scaling.factor", "(1 + rotary.scaling.factor)")
    assert changed != text
    monkeypatch.setattr(huggingface_export, "modelling_file", lambda choices: changed)
    with pytest.raises(CheckpointError, match="transformers .* computes logits that differ"):
        export(checkpoint, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("layout", ["huggingface", "neox"])
def test_a_weight_that_was_written_otherwise(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one bit of one weight, in the last layer."""
    checkpoint = random_checkpoint(tmp_path / "run", **NEOX)

    def damaged(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1).view(torch.int32)[3] ^= 1
        return tensor

    if layout == "huggingface":
        name, write = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight", huggingface_export.write_safetensors

        def wrong(path: Path, weights: Weights, *given: Any) -> None:
            read = weights.read
            altered = Weights(weights.entries, lambda n: damaged(read(n)) if n == name else read(n), weights.source)
            write(path, altered, *given)

        monkeypatch.setattr(huggingface_export, "write_safetensors", wrong)
    else:
        save = neox._save
        monkeypatch.setattr(
            neox,
            "_save",
            lambda content, path: save(
                {
                    n: damaged(v) if n == "mlp.linear1.weight" and "layer_03" in path.name else v
                    for n, v in content.items()
                },
                path,
            ),
        )
    with pytest.raises(CheckpointError, match="blocks.1.mlp.linear1.weight has different values"):
        (export if layout == "huggingface" else export_neox)(checkpoint, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_function_of_a_folder_of_gpt_neox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", **NEOX)
    right = neox.model_yaml
    wrong = lambda *given: right(*given).replace("rotary_pct: 0.5", "rotary_pct: 0.25")  # noqa: E731
    monkeypatch.setattr(neox, "model_yaml", wrong)
    with pytest.raises(CheckpointError, match=r"positions\[0\].rotary_pct is 0.25, not 0.5"):
        export_neox(checkpoint, tmp_path / "exported")
    monkeypatch.setattr(neox, "check_folder", lambda folder, read, *given: read(folder))
    with pytest.raises(CheckpointError, match="megatron-coca import computes logits that differ"):
        export_neox(checkpoint, tmp_path / "exported")


# Without transformers, and large models -------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [LLAMA | YARN, COCA], ids=["stock", "file"])
def test_without_transformers_our_import_compares(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", **keys)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert export(checkpoint, tmp_path / "exported").compared == export_check.IMPORT
    assert "instead of transformers: transformers is not installed" in caplog.text


def test_a_class_that_the_installed_version_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", **LLAMA)
    monkeypatch.setitem(EXPORTERS, "llama", EXPORTERS["llama"]._replace(architecture="NextForCausalLM"))
    assert export(checkpoint, tmp_path / "exported").compared == export_check.IMPORT
    assert "has no NextForCausalLM" in caplog.text


@pytest.mark.parametrize("oldest", [1, 99])
def test_a_model_that_the_installed_version_cannot_load(
    oldest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers 4 does not have every form of a model that 5 has, which is no fault of the export."""

    def fail(*given: Any, **named: Any) -> None:
        raise TypeError("no such layers")

    checkpoint = random_checkpoint(tmp_path / "run", **LLAMA)
    monkeypatch.setattr(transformers_check, "OLDEST", oldest)
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", fail)
    if oldest == 1:
        with pytest.raises(CheckpointError, match="cannot load it"):
            export(checkpoint, tmp_path / "exported")
        return
    assert export(checkpoint, tmp_path / "exported").compared == export_check.IMPORT
    assert "cannot load it (TypeError: no such layers)" in caplog.text


def test_a_large_model_is_compared_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the layers that fit, and those up to the first of the last type, of which the fault may be one."""
    names = ["global", "global", "full", "global", "full"]
    own = {"sliding_window_width": None}
    keys = {"pos_emb": "coca", "num_layers": 5, "attention_config": [[names, 1]], "layer_types": {"full": own}} | WINDOW
    checkpoint = random_checkpoint(tmp_path / "run", **GROUPED | keys)
    opened = open_checkpoint(checkpoint)
    whole = export_check.excerpt(opened.trained, opened.weights())
    assert whole.config.model.num_layers == 5 and whole.weights.entries == opened.weights().entries
    monkeypatch.setattr(export_check, "MEMORY", 1)
    monkeypatch.setattr(export_check, "ROWS", 100)
    part = export_check.excerpt(opened.trained, opened.weights())
    assert part.config.model.num_layers == 3 and part.config.model.padded_vocab_size == 100
    assert part.weights.entries["final_linear.weight"].shape == (100, 32)
    assert not any(name.startswith("blocks.3") for name in part.weights.entries)
    with caplog.at_level(logging.INFO):
        assert export(checkpoint, tmp_path / "exported").model_type == OURS
    assert "3 layers, 64 tokens" in caplog.text


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        ({"seq_length": 2048}, 64),
        ({"seq_length": 2048, "sliding_window_width": 511}, 768),
        ({"seq_length": 2048, "sliding_window_width": 4095}, 64),
        ({"seq_length": 2048, "attention_chunk_size": 100}, 151),
        ({"seq_length": 512}, 768),
        ({"seq_length": 512, "pos_emb": "learned", "max_position_embeddings": 512}, 512),
    ],
    ids=str,
)
def test_the_text_crosses_near_limits(keys: dict[str, Any], length: int, tmp_path: Path) -> None:
    opened = open_checkpoint(random_checkpoint(tmp_path / "run", **LLAMA | keys))
    assert export_check.excerpt(opened.trained, opened.weights()).ids.shape == (1, length)
