"""LoRA by peft on exported CoCA models: only adapters are trained, and the logits here are the same, merged or not."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from megatron_coca.checkpoints import load_model, open_checkpoint
from tests.parity.exported import DENSE, GROUPED, NEOX, TRAINED, modules_cache, random_checkpoint, remote, tokens

pytestmark = pytest.mark.usefixtures("modules_cache")
__all__ = ["modules_cache"]

SHAPES: dict[str, dict[str, Any]] = {
    "llama": GROUPED | {"pos_emb": "coca"},
    "neox": NEOX | {"pos_emb": "coca"},
    "dense": DENSE | {"pos_emb": "coca"},
}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
"""Of the attention; LLaMA's k_proj is the T projection of CoCA."""
LAYERS = 2
STEPS = 15


def adapted(theirs: Any) -> PeftModel:
    """The exported model with adapters on its attention, its own weights frozen."""
    torch.manual_seed(0)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    return get_peft_model(theirs, settings).train()


def trained(model: PeftModel) -> list[float]:
    """Train on one batch that is longer than the training length; the loss at every step."""
    batch, losses = tokens(2 * TRAINED), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2, weight_decay=0.1)
    for _ in range(STEPS):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def own_weights(model: PeftModel) -> dict[str, Tensor]:
    """Copies of all weights that are no adapter's."""
    return {name: weight.clone() for name, weight in model.state_dict().items() if "lora_" not in name}


@pytest.mark.parametrize("kind", SHAPES)
def test_adapters_train_and_their_merger_is_read_here(kind: str, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", **SHAPES[kind])
    model = adapted(remote(checkpoint, tmp_path / "exported"))
    learning = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert all("lora_" in name for name in learning)
    assert len(learning) == 2 * LAYERS * len(PROJECTIONS)

    before = own_weights(model)
    losses = trained(model)
    assert losses[-1] < losses[0] - 0.5
    assert all(torch.equal(weight, before[name]) for name, weight in own_weights(model).items())
    model.save_pretrained(tmp_path / "adapters")

    merged = model.merge_and_unload().eval()
    merged.save_pretrained(tmp_path / "merged")
    batch = tokens(3 * TRAINED)
    with torch.no_grad():
        expected, ours = merged(batch).logits, load_model(tmp_path / "merged")(batch)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        assert (ours - load_model(checkpoint)(batch)).abs().max() > 0.1
        read = load_model(tmp_path / "adapters", {"base_model": str(tmp_path / "exported")})
        torch.testing.assert_close(read(batch), expected, rtol=1e-5, atol=1e-5)
        again = PeftModel.from_pretrained(remote(checkpoint, tmp_path / "base"), tmp_path / "adapters").eval()
        torch.testing.assert_close(again(batch).logits, expected, rtol=1e-4, atol=1e-4)

    old, new = (dict(open_checkpoint(place).weights()) for place in (checkpoint, tmp_path / "merged"))
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert new.keys() == old.keys() and len(changed) == 2 * LAYERS
    assert all(re.fullmatch(r"blocks\.\d\.attention\.(query_key_value|dense)\.weight", name) for name in changed)


@pytest.mark.parametrize("kind", ["llama"])
def test_activations_computed_again_change_nothing(kind: str, tmp_path: Path) -> None:
    """Gradient checkpointing, which long inputs need: the same losses, and no more than rounding between them."""
    checkpoint = random_checkpoint(tmp_path / "run", **SHAPES[kind])
    kept = trained(adapted(remote(checkpoint, tmp_path / "exported")))
    theirs = remote(checkpoint, tmp_path / "again")
    theirs.activation_checkpointing_enable({"use_reentrant": False})
    assert trained(adapted(theirs)) == pytest.approx(kept, abs=1e-4)
