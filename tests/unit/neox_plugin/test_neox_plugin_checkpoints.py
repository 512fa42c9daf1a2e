"""The plugin for GPT-NeoX against a stub: the record of positions in checkpoints, and programs without it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_coca.checkpoints.neox.names import RECORD
from megatron_coca.config import ConfigError
from megatron_coca.neox_plugin import activate
from tests.neox.stubbed import Upstream, stub

__all__ = ["stub"]

COCA: dict[str, Any] = {"pos_emb": "coca"}
ROPE_ID: dict[str, Any] = {"rotary_frequencies": {"type": "rope_id"}}
YARN: dict[str, Any] = {"pos_emb": "rotary", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
ROTARY: dict[str, Any] = {"pos_emb": "rotary", "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


class Engine:
    """DeepSpeed's engine, as far as saving goes: one file without pipeline stages."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.training = nn.ModuleDict({"sequential": module}), True

    def save_checkpoint(self, folder: str, tag: str, client_state: dict[str, Any]) -> None:
        path = Path(folder) / tag
        path.mkdir(parents=True)
        torch.save(client_state | {"module": self.module.state_dict()}, path / "mp_rank_00_model_states.pt")


def saved(stub: Upstream, folder: Path, **keys: Any) -> dict[str, Any]:
    """What a run of the plugin writes at step 7."""
    made = stub.arguments(save=str(folder), **keys)
    engine = Engine(stub["training"].get_model(made))
    stub["checkpointing"].save_ds_checkpoint(7, engine, made)
    return torch.load(folder / "global_step7/mp_rank_00_model_states.pt", weights_only=False)


def load(stub: Upstream, content: dict[str, Any], **keys: Any) -> None:
    """As GPT-NeoX loads a checkpoint: the weights, strictly, and then its arguments are compared."""
    made = stub.arguments(load="runs/old", **keys)
    Engine(stub["training"].get_model(made)).module.load_state_dict(content["module"], strict=True)
    stub["checkpointing"].check_checkpoint_args(made, content["args"])


@pytest.mark.parametrize("keys", [COCA, YARN], ids=["coca", "yarn"])
def test_stock_gpt_neox_finds_no_projection(keys: dict[str, Any], stub: Upstream, tmp_path: Path) -> None:
    """Neither upstream's converter, which reads names one by one, nor its own strict load."""
    upstream = stub["model.transformer"].ParallelSelfAttention
    plain = upstream(stub.arguments(**ROTARY), None, None, None, 0)
    activate()
    module = saved(stub, tmp_path, **keys)["module"]
    with pytest.raises(KeyError, match=r"sequential\.2\.attention\.query_key_value\.weight"):
        module["sequential.2.attention.query_key_value.weight"]
    prefix = "sequential.2.attention."
    layer = {name[len(prefix) :]: weight for name, weight in module.items() if name.startswith(prefix)}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*megatron_coca_query_key_value\.weight"):
        plain.load_state_dict(layer)


def test_a_plain_run_is_saved_as_without_the_plugin(stub: Upstream, tmp_path: Path) -> None:
    before = saved(stub, tmp_path / "before", **ROTARY)
    activate()
    after = saved(stub, tmp_path / "after", **ROTARY)
    assert after["args"] == before["args"] and after["module"].keys() == before["module"].keys()
    assert os.listdir(tmp_path / "after/global_step7") == ["mp_rank_00_model_states.pt"]


@pytest.mark.parametrize("keys", [COCA, YARN], ids=["coca", "yarn"])
@pytest.mark.parametrize("renamed", [True, False])
def test_the_plugin_loads_its_own_checkpoints(
    renamed: bool, keys: dict[str, Any], stub: Upstream, tmp_path: Path
) -> None:
    """Under both names of the projection."""
    activate()
    content = saved(stub, tmp_path, **keys)
    if not renamed:
        module = content["module"]
        content["module"] = {name.replace("megatron_coca_", ""): weight for name, weight in module.items()}
        assert content["module"].keys() != module.keys()
    load(stub, content, **keys)


def test_weights_end_up_where_they_were(stub: Upstream, tmp_path: Path) -> None:
    activate()
    torch.manual_seed(1)
    module = saved(stub, tmp_path, **COCA)["module"]
    model = stub["training"].get_model(stub.arguments(**COCA))
    nn.ModuleDict({"sequential": model}).load_state_dict(module)
    for number in (2, 3):
        for name in ("weight", "bias"):
            found = getattr(model[str(number)]["attention"].query_key_value, name)
            assert torch.equal(found, module[f"sequential.{number}.attention.megatron_coca_query_key_value.{name}"])


@pytest.mark.parametrize(
    ("trained", "now", "message"),
    [
        (COCA, ROTARY, "^pos_emb: rotary does not fit runs/old"),
        (YARN, ROTARY, "^pos_emb: rotary does not fit runs/old"),
        (COCA, {"pos_emb": "xpos"}, "^pos_emb: xpos, but runs/old .*with coca"),
        (COCA, COCA | {"rotary_pct": 0.5}, "^rotary_pct: 0.5, but runs/old .*with 1.0"),
        (COCA, COCA | ROPE_ID, "^rotary_frequencies: {'type': 'rope_id'}, .*runs/old .*None"),
    ],
)
def test_other_positions_are_an_error_except_to_train_further(
    trained: dict[str, Any],
    now: dict[str, Any],
    message: str,
    stub: Upstream,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    activate()
    content = saved(stub, tmp_path, **trained)
    for how in ({}, {"finetune": True, "no_load_optim": True}):  # to resume, and as generation does
        with pytest.raises(ConfigError, match=message):
            load(stub, content, **now, **how)
    load(stub, content, **now, finetune=True)
    assert "was trained with" in caplog.text


def test_a_record_of_an_earlier_version_has_the_frequencies_of_the_base(stub: Upstream, tmp_path: Path) -> None:
    activate()
    content = saved(stub, tmp_path, **COCA)
    del content["args"][RECORD]["rotary_frequencies"]
    load(stub, content, **COCA)
    with pytest.raises(ConfigError, match="^rotary_frequencies: .*was trained with None"):
        load(stub, content, **COCA, **ROPE_ID)


def test_another_extension_is_a_warning(stub: Upstream, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    activate()
    content = saved(stub, tmp_path, **COCA)
    load(stub, content, **COCA)
    assert not caplog.text
    load(stub, content, **COCA, rope_scaling={"rope_type": "ntk", "factor": 2.0})
    assert "rope_scaling: {'rope_type': 'ntk', 'factor': 2.0}, but" in caplog.text


def test_a_checkpoint_without_a_record_is_a_warning(
    stub: Upstream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    activate()
    content = saved(stub, tmp_path, **COCA)
    del content["args"][RECORD]
    load(stub, content, **COCA)
    assert "runs/old: no record" in caplog.text and "using pos_emb: coca" in caplog.text
