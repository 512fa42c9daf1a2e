"""GPT-NeoX's folders: errors by name, the detection of the layout, and unusual folders."""

import logging
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from megatron_coca.checkpoints import CheckpointError, load_model, open_checkpoint
from megatron_coca.checkpoints.neox import read as neox
from megatron_coca.config import load_config
from megatron_coca.evaluation.documents import default_data
from megatron_coca.evaluation.options import SubjectOptions, Variant
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.subject import Evaluation
from megatron_coca.model import build_model
from tests.checkpoint_files import write_checkpoint
from tests.neox_files import write_neox

KEYS: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 16}
KEYS |= {"vocab_size": 128, "pos_emb": "rotary", "no_weight_tying": True, "pipe_parallel_size": 1}
TWO = KEYS | {"model_parallel_size": 2}
SEQUENTIAL = KEYS | {"pipe_parallel_size": 0}


def written(save: Path, keys: dict[str, Any], step: int = 20) -> Path:
    torch.manual_seed(0)
    network = {name: value for name, value in keys.items() if not name.endswith("parallel_size")}
    return write_neox(save, keys, build_model(load_config([], network)).state_dict(), step)


def change(path: Path, **changes: Any) -> None:
    """Change names of a state dict; None takes one away."""
    content: dict[str, Any] = torch.load(path, weights_only=True)
    for name, value in changes.items():
        content[name.replace("__", ".")] = value
    torch.save({name: value for name, value in content.items() if value is not None}, path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return written(tmp_path / "run", TWO)


def fails(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder).weights()


def layer(folder: Path, number: int, rank: int = 0) -> Path:
    return folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt"


class Evil:
    """A pickle that would leave a folder behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("keys", [KEYS, SEQUENTIAL], ids=["layers", "ranks"])
@pytest.mark.parametrize("archive", [True, False])
def test_code_in_a_pickle_is_named_and_not_run(keys: dict[str, Any], archive: bool, tmp_path: Path) -> None:
    folder, mark = written(tmp_path / "run", keys), tmp_path / "mark"
    path = layer(folder, 3) if keys is KEYS else folder / "mp_rank_00_model_states.pt"
    torch.save({"module": Evil(mark)}, path, _use_new_zipfile_serialization=archive)
    fails(folder, f"{path.name}: contains objects other than tensors .posix.mkdir.")
    path.write_bytes(pickle.dumps({"module": Evil(mark)}, protocol=2))
    fails(folder, f"{path.name}: ")
    assert not mark.exists()


@pytest.mark.parametrize("keys", [KEYS, SEQUENTIAL], ids=["layers", "ranks"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_torn_file(keys: dict[str, Any], share: float, tmp_path: Path) -> None:
    folder = written(tmp_path / "run", keys)
    path = layer(folder, 3) if keys is KEYS else folder / "mp_rank_00_model_states.pt"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    fails(folder, f"{path.name}: .*damaged")


def test_missing_files(run: Path) -> None:
    layer(run, 3, 1).unlink()
    fails(run, r"layer_03-model_01-model_states.pt: not found")
    layer(run, 3, 0).unlink()
    fails(run, r"layer 03 \(layer_03-model_00-.* is either in .*num_layers .2.")


def test_files_of_only_one_rank(run: Path) -> None:
    for path in run.glob("*_01*"):
        path.unlink()
    fails(run, "files of 1 tensor ranks, .*model_parallel_size is 2")


def test_missing_files_of_a_rank(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", SEQUENTIAL | {"model_parallel_size": 2})
    (folder / "mp_rank_00_model_states.pt").unlink()
    fails(folder, "mp_rank_00_model_states.pt: not found")


def test_layers_that_the_configuration_does_not_know(run: Path) -> None:
    for rank in range(2):
        shutil.copy(layer(run, 3, rank), layer(run, 7, rank))
    fails(run, "layer 07 .* not in both; .*num_layers .2.")


def test_tied_by_its_configuration_with_a_head_in_its_files(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", KEYS)
    (folder / "configs" / "z.yml").write_text("no-weight-tying: false\n")
    fails(folder, "layer 06 .* not in both; .*no_weight_tying .False")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp__linear1__weight": torch.zeros(32, 15)}, "linear1.weight has other shapes or dtypes"),
        ({"mlp__linear1__bias": torch.zeros(32).half()}, "linear1.bias has other shapes or dtypes"),
        ({"mlp__linear3__weight": torch.zeros(2, 2)}, "mlp.linear3.weight is missing on some"),
        ({"mlp__linear2__weight": None}, "mlp.linear2.weight is missing on some"),
        ({"mlp__linear2__weight": [1.0]}, "mlp.linear2.weight is not a floating-point tensor"),
        ({"mlp__linear2__weight": torch.zeros(16, 32).int()}, "mlp.linear2.weight is not a floating-point tensor"),
    ],
)
def test_ranks_that_do_not_fit_together(run: Path, changes: dict[str, Any], message: str) -> None:
    change(layer(run, 2, 1), **changes)
    fails(run, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mlp__linear1__weight": torch.zeros(8, 16)},
            r"linear1.weight has shape \[8, 16\] on each of 2 .*configuration",
        ),
        (
            {"attention__query_key_value__weight": torch.zeros(48, 16)},
            r"has shape \[48, 16\] on each of 2 tensor ranks",
        ),
        (
            {"attention__qk_layernorm__weight": torch.zeros(8)},
            "the model has no weight .*qk_layernorm.weight",
        ),
        ({"attention__alibi_embed__slopes": torch.zeros(1)}, "the model has no weight .*slopes"),
    ],
)
def test_weights_of_another_model(run: Path, changes: dict[str, Any], message: str) -> None:
    for rank in range(2):
        change(layer(run, 2, rank), **changes)
    fails(run, message)


def test_whole_weights_are_compared_with_the_model(run: Path) -> None:
    for rank in range(2):
        change(layer(run, 3, rank), input_layernorm__weight=torch.zeros(8), mlp__linear2__bias=None)
    with pytest.raises(CheckpointError, match=r"missing blocks.1.mlp.linear2.bias; .*shape \[8\], the model \[16\]"):
        load_model(run)


def test_frequencies_of_rotation_are_no_weights(run: Path) -> None:
    expected = load_model(run).state_dict()
    for rank in range(2):
        change(layer(run, 2, rank), attention__rotary_emb__inv_freq=torch.ones(4))
    assert all(torch.equal(weight, expected[name]) for name, weight in load_model(run).state_dict().items())


def test_copies_that_differ_are_averaged_with_a_warning(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(layer(run, 2, 0), input_layernorm__weight=torch.full((16,), 0.5))
    with caplog.at_level(logging.WARNING):
        weight = open_checkpoint(run).weights().read("blocks.0.input_layernorm.weight")
    assert torch.equal(weight, torch.full((16,), 0.75))
    assert "input_layernorm.weight of layer 02: the copies" in caplog.text


def test_a_table_that_is_not_one(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", KEYS | {"pos_emb": "rpe"})
    change(layer(folder, 3), attention__rpe__weight=torch.ones(32, 2))
    weights = open_checkpoint(folder).weights()
    with pytest.raises(CheckpointError, match="rpe.weight of layer 02 and .* of layer 03 differ"):
        weights.read("positions.bias.weight")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"use-qk-layernorm": True}, "use_qk_layernorm"),
        ({"norm": "te_layernorm"}, "norm.*te_layernorm"),
        ({"num-layers": 1, "new_feature": 1}, "new_feature"),
        ({"gpt_j_residual": True, "use_bias_in_mlp": False}, "GPT-NeoX omits the attention output"),
    ],
)
def test_networks_that_are_not_here(run: Path, extra: dict[str, Any], message: str) -> None:
    (run / "configs" / "z.yml").write_text("".join(f"{name}: {value}\n" for name, value in extra.items()))
    fails(run, message)


def test_a_window_is_that_of_every_layer(run: Path) -> None:
    (run / "configs" / "z.yml").write_text("sliding_window_width: 8\n")
    model = load_model(run)
    assert [block.attention.method.window for block in model.blocks] == [9, 9]


@pytest.mark.parametrize("keys", [KEYS, SEQUENTIAL], ids=["layers", "ranks"])
def test_weights_of_the_plugin_under_a_plain_configuration(keys: dict[str, Any], tmp_path: Path) -> None:
    """After a change of the YAML files, or their loss: nothing else says that they are not plain rotary positions."""
    folder = written(tmp_path / "run", keys | {"pos_emb": "coca"})
    for path in folder.glob("*.pt"):
        content = torch.load(path, weights_only=False)
        held = content.get("module") or content
        for name in [name for name in held if "attention.query_key_value" in name]:
            held[name.replace("query_key_value", "megatron_coca_query_key_value")] = held.pop(name)
        torch.save(content, path)
    assert open_checkpoint(folder).trained.position.pos_emb == "coca"
    assert "blocks.1.attention.query_key_value.weight" in dict(open_checkpoint(folder).weights())
    for path in (folder / "configs").iterdir():
        path.write_text(path.read_text().replace("coca", "rotary"))
    fails(folder, "of the GPT-NeoX plugin, .*pos_emb: rotary")


def test_without_a_configuration(run: Path) -> None:
    shutil.rmtree(run / "configs")
    fails(run, "no configs/.*copy the YAML files")


def test_layers_are_opened_one_after_the_other(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, opened = open_checkpoint(run).weights(), []
    load = neox.load_pickle
    monkeypatch.setattr(neox, "load_pickle", lambda path, *allowed: opened.append(path) or load(path, *allowed))
    for _ in weights:
        pass
    assert opened == [layer(run, number, rank) for number in (0, 2, 3, 5, 6) for rank in range(2)]


def test_zero_3(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", SEQUENTIAL)
    rank = folder / "mp_rank_00_model_states.pt"
    rank.rename(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    fails(folder, "saved with ZeRO 3")


def test_which_step_is_meant(tmp_path: Path) -> None:
    save = tmp_path / "run"
    for step in (3, 10, 9):
        written(save, KEYS, step)
    assert open_checkpoint(save).step == 9, "the one that latest names"
    (save / "latest").write_text("global_step3\n")
    assert open_checkpoint(save).step == 3
    (save / "latest").unlink()
    assert open_checkpoint(save).step == 10 and open_checkpoint(save / "global_step9").step == 9


def test_ours_and_theirs_in_one_folder(tmp_path: Path) -> None:
    save = tmp_path / "run"
    written(save, KEYS, 20)
    ours = write_checkpoint(save, load_config([], {n: v for n, v in KEYS.items() if n != "pipe_parallel_size"}), step=9)
    assert (ours / "latest").read_text().strip() == "global_step9"
    assert open_checkpoint(save).step == 9 and open_checkpoint(save).tokenizer_folder is not None
    assert open_checkpoint(save / "global_step20").tokenizer_folder is None
    (save / "latest").write_text("global_step20")
    assert open_checkpoint(save).step == 20
    (save / "latest").unlink()
    assert open_checkpoint(save).step == 9, "without latest, ours"


def test_identities(tmp_path: Path) -> None:
    first, second = (written(tmp_path / name, KEYS) for name in ("first", "second"))
    opened = open_checkpoint(first)
    assert opened.identity == open_checkpoint(second).identity == open_checkpoint(tmp_path / "first").identity
    tensor: Tensor = torch.load(layer(second, 3))["mlp.linear1.weight"]
    tensor[40, 7] += 1
    change(layer(second, 3), mlp__linear1__weight=tensor)
    assert opened.identity != open_checkpoint(second).identity


@pytest.mark.parametrize("value", ["abc", "[1]", "{a: 1}", "1.5", "9" * 32, "-3"])
@pytest.mark.parametrize("key", ["model_parallel_size", "num_layers", "vocab_size", "make_vocab_size_divisible_by"])
def test_strange_values_of_a_configuration(key: str, value: str, run: Path) -> None:
    (run / "configs/z.yml").write_text(f"{key}: {value}\n")
    if key in ("vocab_size", "make_vocab_size_divisible_by"):  # the embedding's rows count
        open_checkpoint(run)
    else:
        fails(run, rf"(configs: {key}: expected|{key} is {value} in configs)")


TRAINED_ON = {"train_data_paths": ["d"], "valid-data-paths": ["e"]}


@pytest.mark.parametrize(
    ("recorded", "found"),
    [
        ({"test-data-paths": ["a/b", "c"], **TRAINED_ON, "data_path": "unused"}, ["a/b", "c"]),
        ({"data_path": "a/b", "split": "969, 30, 1"}, "test_data_paths: not set.*--data"),
        ({"test_data_paths": [], **TRAINED_ON}, "test_data_paths: not set.*--data"),
    ],
)
def test_evaluation_reads_the_test_data_of_the_run(recorded: dict[str, Any], found: Any, tmp_path: Path) -> None:
    """Not the built-in corpus, which has another tokenizer."""
    run = written(tmp_path / "run", KEYS)
    file = next((run / "configs").iterdir())
    file.write_text(file.read_text() + yaml.safe_dump(recorded))
    evaluation = Evaluation(
        SubjectOptions(str(run), (Variant("a", (), ()),), "cpu", "float32", None, False), "perplexity"
    )
    if isinstance(found, list):
        assert default_data(evaluation) == found
    else:
        with pytest.raises(EvaluationError, match=found):
            default_data(evaluation)
