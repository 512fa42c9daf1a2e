"""Our models give the logits that the CoCA authors' released code gave for the same weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_coca import load_model
from megatron_coca.checkpoints import CheckpointError, load_checkpoint

AUTHORS = Path(__file__).parents[1] / "golden" / "authors"
SCALINGS = {
    "none": {},
    "linear4": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic4": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
}


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("length", [32, 96])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("folder", ["coca_gpt_neox", "coca_llama"])
def test_logits(folder: str, scaling: str, length: int, backend: str) -> None:
    reference = load_file(AUTHORS / folder / "reference.safetensors")
    model = load_model(AUTHORS / folder, {"pos_emb": "coca", "attention_backend": backend, **SCALINGS[scaling]})
    with torch.inference_mode():
        logits = model(reference[f"input_ids.{length}"])
    torch.testing.assert_close(logits, reference[f"logits.{scaling}.{length}"], atol=1e-4, rtol=0)


def test_the_llama_layout_says_coca_itself() -> None:
    assert load_checkpoint(AUTHORS / "coca_llama").config.position.pos_emb == "coca"


def test_an_override_that_changes_the_shape_is_refused() -> None:
    with pytest.raises(CheckpointError, match="num_layers .saved 2, now 3."):
        load_model(AUTHORS / "coca_llama", {"num_layers": 3})
