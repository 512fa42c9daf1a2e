"""The cells that an ablation stands for, their names, and the errors before anything runs."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from megatron_coca.ablation.cells import read_cell, recorded_data, write_cell
from megatron_coca.ablation.file import read_ablation
from megatron_coca.ablation.grid import RUN_KEYS, Cell, cell_hash, expand, select
from megatron_coca.config import load_config
from megatron_coca.evaluation import EvaluationError
from megatron_coca.training import corpus as training_corpus
from megatron_coca.training.checkpointing.resume import FREE_KEYS

ROOT = Path(__file__).parents[3]
LLAMA = ROOT / "tests/golden/authors/coca_llama"
DATA = {"tokens": [100], "sha256": ["ab"]}
Write = Callable[..., Path]


def cells_of(file: Path) -> list[Cell]:
    return expand(read_ablation(file), "cpu")


def test_a_cell_for_each_model_and_seed(write: Write, tmp_path: Path) -> None:
    cells = cells_of(write())
    assert [(cell.model, cell.seed) for cell in cells] == [
        ("RoFormer", 1),
        ("RoFormer", 2),
        ("NoPE", 1),
        ("NoPE", 2),
    ]
    first = cells[0]
    assert first.name.startswith("roformer-s1-") and len(first.name.rpartition("-")[2]) == 8
    assert first.config.position.pos_emb == "rotary" and first.config.seed == 1 and first.steps == 6
    assert first.config.checkpoint.save == str(tmp_path / "runs" / first.name)
    assert first.tokens == 6 * 4 * 32 and cells[2].config.model.max_position_embeddings == 64
    (command,) = first.commands
    folder = tmp_path / "results" / first.name
    assert command.files == (folder / "perplexity_roformer.json", folder / "perplexity_roformer_ntk.json")
    assert "32,64" in command.arguments and str(first.run) in command.arguments


def test_the_model_follows_the_base_and_its_keys_win(write: Write, tmp_path: Path) -> None:
    (tmp_path / "short.yml").write_text("train_iters: 3\n")
    models = {"One": [str(tmp_path / "short.yml")], "Two": ["train_iters=4"]}
    assert [cell.steps for cell in cells_of(write(models=models, seeds=[1], baseline=None))] == [3, 4]


def test_names_change_with_the_inputs_of_the_weights(write: Write, tmp_path: Path) -> None:
    def name(keys: dict[str, Any] | None = None, **changes: Any) -> str:
        return cells_of(write(keys, **changes))[0].name

    plain = name()
    same = [
        name({"log_interval": 5, "eval_iters": 3}),
        name({"train_micro_batch_size_per_gpu": 4}),  # the same batch
        name({"weight_decay": 0.1}),  # the default
        name({"attention_backend": "sdpa"}),
        name(runs=str(tmp_path / "other"), title="Other", seeds=[1]),
        name(tasks={"passkey": {"lengths": ["32L"]}}),
    ]
    assert set(same) == {plain}
    others = [name({"train_batch_size": 8}), name({"weight_decay": 0.2}), name({"seq_length": 16}), name(seeds=[3])]
    assert len({*others, plain}) == 5


def test_a_cell_drops_its_positions(write: Write, tmp_path: Path) -> None:
    """Variants, lengths and parameters are those of the last stage; tokens and name are those of all stages."""
    stages = "stages=[{until: 4}, {pos_emb: none, qk_norm: head, seq_length: 64, train_batch_size: 2}]"
    (tmp_path / "log_n.yml").write_text("logit_scaling: log_n\n")
    dropped = {"set": ["pos_emb=rotary", stages], "variants": {"": [], "+ log n": [str(tmp_path / "log_n.yml")]}}
    models = {"RoFormer": ["pos_emb=rotary"], "DroPE": dropped}
    rotary, cell = cells_of(write(models=models, seeds=[1]))
    assert (cell.trained.position.pos_emb, cell.config.position.pos_emb) == ("none", "rotary")
    assert cell.tokens == 4 * 4 * 32 + 2 * 2 * 64 and cell.steps == 6
    assert cell.parameters.total == rotary.parameters.total + 2 * 2 * 16
    (command,) = cell.commands
    assert "64,128" in command.arguments and len(cell.measurements) == 2
    names = []
    for until, form in ((4, "none"), (5, "none"), (4, "coca")):
        changes = ["pos_emb=rotary", f"stages=[{{until: {until}}}, {{pos_emb: {form}}}]"]
        names.append(cells_of(write(models={"DroPE": changes}, baseline=None))[0].name)
    assert len({*names}) == 3, "the name covers the stages"
    wrong = dropped | {"variants": {"": [], "+ NTK": [str(tmp_path / "ntk.yml")]}}
    with pytest.raises(EvaluationError, match=r"models.DroPE: variants.\+ NTK: .* pos_emb none"):
        cells_of(write(models={"RoFormer": ["pos_emb=rotary"], "DroPE": wrong}))


def test_a_name_covers_data_dtype_and_initial_weights_but_no_run_key(small: dict[str, Any]) -> None:
    config = load_config([], small)
    plain = cell_hash(config, 4, DATA)
    everything = {key: value for key, value in config.flat().items() if value is not None}
    assert cell_hash(load_config([], everything), 4, DATA) == plain, "written out, it is the same configuration"
    others = [
        cell_hash(config, 8, DATA),
        cell_hash(config, 4, DATA | {"tokens": [101]}),
        cell_hash(config, 4, DATA, weights="of another run"),
        cell_hash(config.override({"precision": "bfloat16"}), 4, DATA),
        cell_hash(config.override({"loss_spike_policy": "skip"}), 4, DATA),
    ]
    assert len({*others, plain}) == 6
    assert FREE_KEYS - {"optimizer.params.lr"} <= RUN_KEYS, "resuming may change these, except the learning rate"


def test_every_fault_is_listed_at_once(write: Write, tmp_path: Path) -> None:
    models = {
        "RoFormer": ["pos_emb=rotary"],
        "Typo": ["pos_embb=rotary"],
        "Overlay": [str(tmp_path / "absent.yml")],
        "ALiBi": {
            "set": ["pos_emb=alibi", "rotary_pct=1.0"],
            "variants": {"+ NTK": [str(tmp_path / "ntk.yml")], "larger": ["hidden_size=64"]},
        },
        "Shared": ["log_dir=logs"],
    }
    tasks = {
        "perplexity": {"windws": [32]},
        "perplexity value": {"windows": [32], "stride": "long"},
        "perplexity data": {"windows": [32], "stride": 32, "data": ["absent"]},
        "knitting": {},
        "speed": {"config": ["a.yml"], "lengths": [1]},  # of no checkpoint
    }
    with pytest.raises(EvaluationError) as refused:
        cells_of(write(models=models, tasks=tasks, baseline="CoCA"))
    lines = str(refused.value).splitlines()
    for part in (
        "baseline: CoCA: unknown; known models: RoFormer | Typo",
        "models.Typo: command line: pos_embb: unknown key",
        "models.Overlay: ",
        "models.ALiBi: variants.+ NTK: ",
        "models.ALiBi: variants.larger: the model: its weights",
        "models.Shared: log_dir: all cells",
        "tasks.perplexity.windws: unknown option",
        "tasks.perplexity value: argument --stride",
        "tasks.perplexity data: absent: no such text file",
        "tasks.knitting: unknown task",
        "tasks.speed: unknown task",
    ):
        assert sum(line.startswith(part) for line in lines) == 1, f"{part}\n{refused.value}"


def test_faults_of_the_base_come_first(write: Write) -> None:
    base = yaml.safe_load(write().read_text())["base"]
    with pytest.raises(EvaluationError) as refused:
        cells_of(write(base=[*base, "seedd=3"], baseline="CoCA", models={"Typo": ["pos_embb=rotary"]}))
    unknown, fault = [line for line in str(refused.value).splitlines() if not line.endswith("ablation.yml:")]
    assert unknown.startswith("baseline: CoCA: unknown") and fault.startswith("base: command line: seedd: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [1, 1]}, "roformer-s1-.*: two cells .*, RoFormer with seed 1 and"),
        ({"base": ["optimizer.params.lr=1"]}, "base: command line: describes no model \\(num_layers"),
        ({"models": {}}, "models: "),
        ({"testing": "sequence"}, "testing: a sequence needs contrasts"),
        ({"modles": {}}, "modles: unknown key; .* of an ablation"),
    ],
)
def test_mistakes_are_named(write: Write, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        cells_of(write(**changes))


def test_missing_shards_name_the_command_that_makes_them(write: Write) -> None:
    with pytest.raises(EvaluationError, match=r"absent.bin: no such file.*megatron-coca prepare"):
        cells_of(write({"train_data_paths": ["absent"]}))


def test_a_plan_needs_no_data(write: Write, corpus: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cells have their full names with the data or with a record of it, and names without a hash otherwise."""

    def plan(file: Path) -> tuple[list[Cell], list[str]]:
        absent: list[str] = []
        read = read_ablation(file)
        return expand(read, "cpu", recorded=recorded_data(read.results), absent=absent), absent

    cells = cells_of(write())
    assert [cell.name for cell in plan(write())[0]] == [cell.name for cell in cells] and plan(write())[1] == []
    prepared = []
    monkeypatch.setattr(training_corpus, "ensure_builtin", lambda *given: prepared.append(given))
    tasks = {"perplexity": {"data": ["absent.txt", "s3://store/test"], "windows": ["1L"], "stride": "1L"}}
    tasks |= {"needle": {"lengths": ["32L"], "haystack": ["builtin"]}}
    none = {"train_data_paths": None, "valid_data_paths": None, "test_data_paths": None, "data_root": str(tmp_path)}
    planned, absent = plan(write(none, tasks=tasks))
    assert [cell.name for cell in planned] == ["roformer-s1", "roformer-s2", "nope-s1", "nope-s2"] and not prepared
    assert [cell.tokens for cell in planned] == [cell.tokens for cell in cells]
    assert {line.partition(":")[0] for line in absent} == {"tasks.perplexity", f"{tmp_path}/builtin"}
    shards = {"train_data_paths": ["absent"], "test_data_paths": ["s3://store/test"]}
    planned, absent = plan(write(shards))
    assert planned[0].name == "roformer-s1" and any(line.startswith("absent: no such shard") for line in absent)
    assert any(line.startswith("s3://store/test: on a store") for line in absent)
    record = read_cell(planned[0]).model_copy(update={"data": planned[0].data.model_copy(update={"identity": DATA})})
    write_cell(planned[0], record)
    again, _ = plan(write(shards))
    assert again[0].name.startswith("roformer-s1-") and again[2].name.startswith("nope-s1-")
    with pytest.raises(EvaluationError, match="vocab_size: not set, and the training data"):
        plan(write(shards | {"vocab_size": None, "data_root": "elsewhere"}))


def test_only_names_models_cells_and_seeds(write: Write) -> None:
    cells = cells_of(write())
    assert select(cells, []) == cells
    assert select(cells, ["NoPE"]) == cells[2:] and select(cells, ["s2"]) == cells[1::2]
    assert select(cells, ["NoPE", "s1"]) == [cells[2]]
    assert select(cells, [cells[0].name, "NoPE"]) == [cells[0], *cells[2:]]
    with pytest.raises(EvaluationError, match=r"--only s3: unknown; known: RoFormer"):
        select(cells, ["s3"])


def test_a_named_cell_is_chosen_whatever_the_seeds(write: Write) -> None:
    first, second, third, fourth = cells_of(write())
    assert select([first, second, third, fourth], ["RoFormer", "s1", fourth.name]) == [first, fourth]
    assert select([first, second, third, fourth], ["s1", second.name]) == [first, second, third]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["seed=7"], "seed: the command sets it"),
        (["save=elsewhere"], "save: the command sets it"),
        (["load=elsewhere"], "load: .*only initial weights; set finetune=true"),
    ],
)
def test_keys_of_the_runner_are_errors(write: Write, keys: list[str], message: str) -> None:
    with pytest.raises(EvaluationError, match=f"models.One: {message}"):
        cells_of(write(models={"One": keys}, baseline=None))


def test_a_model_that_starts_from_weights_has_a_default_learning_rate(write: Write) -> None:
    models = {"m": [f"load={LLAMA}", "finetune=true", "optimizer.params.lr=null"]}
    assert {cell.config.optimizer.lr for cell in cells_of(write(models=models, baseline=None))} == {1e-4}


def test_initial_weights_are_named_by_their_content(write: Write, tmp_path: Path) -> None:
    """Folders of one name, such as checkpoint-500 of two runs, and a folder that is written again in place."""
    folders = [tmp_path / run / "checkpoint-500" for run in ("one", "two", "copy")]
    for folder, factor in zip(folders, (1.0, 1.5, 1.0), strict=True):
        shutil.copytree(LLAMA, folder)
        tensors = load_file(folder / "model.safetensors")
        save_file({name: tensor * factor for name, tensor in tensors.items()}, folder / "model.safetensors")

    def name(folder: Path) -> str:
        return cells_of(write(models={"m": [f"load={folder}", "finetune=true"]}, baseline=None))[0].name

    one, two, copy = map(name, folders)
    assert one == copy != two
    shutil.copy(folders[0] / "model.safetensors", folders[1])
    assert name(folders[1]) == one


def test_a_model_after_another_starts_with_its_weights_by_seed(write: Write) -> None:
    """The name covers what the start was trained with; the seeds of one model differ in their start."""
    models = {"Base": ["pos_emb=rotary"], "CoCA": {"set": ["pos_emb=coca"], "after": "Base"}, "Own": ["pos_emb=coca"]}
    cells = cells_of(write(models=models, baseline=None))
    base, after, own = cells[:2], cells[2:4], cells[4:]
    assert [each.start for each in after] == base and not any(each.start for each in (*base, *own))
    checkpoints = [each.config.checkpoint for each in after]
    assert [(each.load, each.finetune) for each in checkpoints] == [(str(each.run), True) for each in base]
    assert after[0].name.rpartition("-")[2] != own[0].name.rpartition("-")[2]
    longer = models | {"Base": ["pos_emb=rotary", "train_iters=7"]}
    renamed = cells_of(write(models=longer, baseline=None))
    assert renamed[2].name != after[0].name and [each.name for each in renamed[4:]] == [each.name for each in own]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"A": {"after": "B"}, "B": []}, "models.A: after: B: no model above it; known: none"),
        ({"A": [], "B": {"after": "B"}}, "models.B: after: B: no model above it; known: A"),
        (
            {"A": [], "B": {"after": "A", "set": ["load=x", "finetune=true"]}},
            "models.B: load: `after` already loads the weights",
        ),
    ],
)
def test_a_start_that_cannot_be_is_an_error(write: Write, models: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        cells_of(write(models=models, baseline=None))
