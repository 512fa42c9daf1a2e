"""A run resumes from a checkpoint of GPT-NeoX with its optimizer. test_neox_plugin.py does so in a real checkout."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from megatron_coca import load_model
from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.exporting import export_neox
from megatron_coca.checkpoints.native.state import StateReader
from megatron_coca.checkpoints.neox.layout import table
from megatron_coca.config import load_config

STOP, STEPS = 4, 12
PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def write_as_neox(checkpoint: Path, folder: Path, tensor: int, data: int, prefix: str = "") -> Path:
    """Our checkpoint as GPT-NeoX saves one with ZeRO 1: as DeepSpeed does, every vector is padded and divided evenly
    among data ranks, wherever parameters end.
    """
    step = export_neox(checkpoint, folder, [], None, tensor, 0).step
    config = load_config([checkpoint / native.CONFIG])
    with StateReader(checkpoint / native.STATE, native.state_files(checkpoint)) as reader:
        saved = {(kind, name): reader.whole(name, kind).clone() for name in reader.shapes for kind in KINDS}
    options = {"lr": 1e-3, "betas": config.optimizer.betas, "eps": config.optimizer.eps}
    for rank in range(tensor):
        groups: list[dict[str, dict[str, torch.Tensor]]] = [OrderedDict(), OrderedDict()]
        for location, weight in table(config).items():
            if ("weight", weight.ours) not in saved or not weight.used:
                continue
            values = {kind: saved[kind, weight.ours] for kind in KINDS}
            summed = weight.sharding.kind == "sum"
            parts = {
                kind: whole if summed and kind != "weight" else weight.sharding.split(whole, tensor)[rank]
                for kind, whole in values.items()
            }
            groups[values["weight"].dim() < 2][f"sequential.{location.layer}.{location.name}"] = parts
        vectors = [{kind: flattened(group, kind, 2 * data) for kind in KINDS} for group in groups]
        for number in range(data):
            shares = [{kind: flat.chunk(data)[number] for kind, flat in vector.items()} for vector in vectors]
            state: dict[str, Any] = {
                "loss_scaler": LossScaler(1.0),
                "zero_stage": ZeroStageEnum.optimizer_states,
                "base_optimizer_state": {
                    "state": {
                        index: {"step": torch.tensor(float(STOP))} | {kind: share[kind].clone() for kind in KINDS[1:]}
                        for index, share in enumerate(shares)
                    },
                    "param_groups": [options | {"weight_decay": decay, "params": [0]} for decay in (0.1, 0.0)],
                },
                "single_partition_of_fp32_groups": [share["weight"].clone() for share in shares],
                "param_slice_mappings": [
                    ranges(group, share["weight"].numel(), number) for group, share in zip(groups, shares, strict=True)
                ],
            }
            path = step / f"{prefix}zero_pp_rank_{number}_mp_rank_{rank:02}_optim_states.pt"
            torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, path)
    return folder


def flattened(group: dict[str, dict[str, torch.Tensor]], kind: str, multiple: int) -> torch.Tensor:
    flat = torch.cat([parts[kind].reshape(-1) for parts in group.values()])
    return torch.cat([flat, torch.zeros(-flat.numel() % multiple)])


def ranges(group: dict[str, dict[str, torch.Tensor]], size: int, number: int) -> dict[str, fragment_address]:
    """What of each parameter is in partition `number`, of `size` elements."""
    found: dict[str, fragment_address] = OrderedDict()
    end = 0
    for name, parts in group.items():
        start, end = end, end + parts["weight"].numel()
        first, last = max(start, number * size), min(end, (number + 1) * size)
        if first < last:
            found[name] = fragment_address(numel=last - first, start=first - number * size)
    return found


@pytest.fixture(scope="module")
def stopped(live: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of ours that goes to its end, and of one that stops."""
    folder = tmp_path_factory.mktemp("plain")
    live(PLAIN | {"save": str(folder / "whole")})
    live(PLAIN | {"save": str(folder / "stopped"), "exit_interval": STOP})
    return folder


@pytest.mark.fewest
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(partial(write_as_neox, tensor=1, data=1), id="one rank"),
        pytest.param(partial(write_as_neox, tensor=2, data=3, prefix="bf16_"), id="six ranks"),
    ],
)
def test_no_bit_is_lost_on_the_way(
    write: Callable[[Path, Path], object],
    stopped: Path,
    live: Any,
    open_run: Any,
    assert_same_state: Any,
    tmp_path: Path,
) -> None:
    theirs = tmp_path / "theirs"
    write(stopped / f"stopped/global_step{STOP}", theirs)
    keys = PLAIN | {"load": str(theirs), "save": str(tmp_path / "run"), "auto_resume": True}
    for stop in (7, STEPS):  # from their checkpoint, then from our own
        live(keys | {"exit_interval": stop})
    whole, run = open_run(stopped / "whole"), open_run(tmp_path / "run")
    assert whole.losses[STOP:] == run.losses and whole.weights(STEPS) == run.weights(STEPS)
    ended, expected = (
        {name: value for name, value in each.state(STEPS).items() if "rng" not in name} for each in (run, whole)
    )
    assert expected
    assert_same_state(ended, expected)


@pytest.mark.slow
def test_their_run_goes_on_without_positions(
    stopped: Path, live: Any, open_run: Any, assert_same_state: Any, tmp_path: Path
) -> None:
    """As our own run does in a new stage; norms are added with an optimizer state of their own."""
    theirs = write_as_neox(stopped / f"stopped/global_step{STOP}", tmp_path / "theirs", tensor=1, data=1)
    form = {"pos_emb": "none", "use_qk_layernorm": True}
    live(PLAIN | {"stages": [{"until": STOP}, form], "save": str(tmp_path / "staged")})
    keys = PLAIN | form | {"load": str(theirs), "save": str(tmp_path / "run"), "auto_resume": True}
    for stop in (7, STEPS):
        live(keys | {"exit_interval": stop})
    staged, run = open_run(tmp_path / "staged"), open_run(tmp_path / "run")
    assert staged.losses[STOP:] == run.losses and staged.weights(STEPS) == run.weights(STEPS)
    ended, expected = (
        {name: value for name, value in each.state(STEPS).items() if "rng" not in name} for each in (run, staged)
    )
    assert_same_state(ended, expected)
    exported = export_neox(tmp_path / f"run/global_step{STEPS}", tmp_path / "exported").folder
    tokens = torch.arange(40)[None]
    assert torch.equal(load_model(exported)(tokens), load_model(tmp_path / "run")(tokens))
    refused = live(keys | {"pos_emb": "rpe", "save": str(tmp_path / "other")}, expected=2)
    assert "pos_emb (coca becomes rpe, " in " ".join(refused.output.split())


@pytest.mark.slow
def test_an_optimizer_begins_anew_at_their_step(stopped: Path, live: Any, open_run: Any, tmp_path: Path) -> None:
    theirs = export_neox(stopped / f"stopped/global_step{STOP}", tmp_path / "theirs").folder
    keys = PLAIN | {"no_load_optim": True, "exit_interval": 6}
    live(keys | {"load": str(theirs), "save": str(tmp_path / "run")})
    live(keys | {"load": str(stopped / "stopped"), "save": str(tmp_path / "own")})
    assert open_run(tmp_path / "run").losses == open_run(tmp_path / "own").losses
    assert native.read_meta(tmp_path / "run/global_step6")["counters"]["step"] == 2


def test_unsupported_states_are_errors(stopped: Path, live: Any, tmp_path: Path) -> None:
    theirs = write_as_neox(stopped / f"stopped/global_step{STOP}", tmp_path / "theirs", 1, 2)
    keys = PLAIN | {"load": str(theirs), "save": str(tmp_path / "run")}
    for changes, reason in {
        ("save", None): "set save=FOLDER",
        ("save", str(theirs)): "contains GPT-NeoX checkpoints; choose another save folder",
        ("weight_decay", 0.2): "with a different weight_decay (saved 0.1, now 0.2)",
        ("optimizer.type", "sgd"): "optimizer.type (saved exp_avg and exp_avg_sq, now 'sgd')",
        ("rotary_emb_base", 500): "with a different rotary_emb_base (saved 10000.0, now 500.0)",
        ("hidden_size", 48): "with another hidden_size (saved 32, now 48)",
    }.items():
        refused = live(keys | dict([changes]), expected=None)
        assert refused.status == 2, changes
        assert reason in refused.output, refused.output[-1500:]
    assert not list((tmp_path / "run").glob("*global_step*"))
    (file,) = theirs.rglob("*rank_1_mp_rank_00_optim_states.pt")
    content = file.read_bytes()
    file.unlink()
    assert "copy the optim_states.pt files" in live(keys, expected=2).output
    file.write_bytes(content[: len(content) // 2])
    assert f"{file}: damaged" in live(keys, expected=2).output
    torch.save({"optimizer_state_dict": {"zero_stage": 3}}, file)
    assert f"{file}: not a partition" in live(keys, expected=2).output
    for path in theirs.rglob("*optim_states.pt"):
        path.unlink()
    assert ": no *_optim_states.pt" in live(keys, expected=2).output
    assert not list((tmp_path / "run").glob("*global_step*"))
