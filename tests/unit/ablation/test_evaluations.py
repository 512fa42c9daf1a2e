"""The evaluations of cells: which are measured, with which digests, and whether their prompts fit."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_coca.ablation.file import read_ablation
from megatron_coca.ablation.grid import Cell, expand
from megatron_coca.evaluation import EvaluationError

Write = Callable[..., Path]


def cells_of(file: Path) -> list[Cell]:
    return expand(read_ablation(file), "cpu")


@pytest.mark.parametrize("task", ["passkey", "needle", "ruler", "margin"])
def test_a_length_without_room_for_a_prompt_is_found_before_training(task: str, write: Write) -> None:
    tokenizer = {"tokenizer_type": "CharLevelTokenizer"}
    own = {
        "needle": {"cases": 2, "depths": [50]},
        "ruler": {"cases": 2, "tasks": ["multi_key"]},
        "margin": {"facts": 2},
    }
    tasks = {task: {"lengths": [1024, "1L"], **own.get(task, {"cases": 2})}}
    length = 32 - 8 * (task == "margin")  # without room for the answer
    with pytest.raises(
        EvaluationError, match=rf"^tasks\.{task}: length {length}: the prompt has \d+ tokens even without"
    ):
        cells_of(write(tokenizer, tasks=tasks))
    tasks[task]["lengths"] = [1024]
    assert len(cells_of(write(tokenizer, tasks=tasks))) == 4


def test_a_variant_or_an_option_changes_its_own_results_only(write: Write, tmp_path: Path) -> None:
    plain = cells_of(write())[0].measurements
    (tmp_path / "more.yml").write_text("rope_scaling: {rope_type: dynamic, factor: 4.0}\n")
    variants = {"": [], "+ NTK": [str(tmp_path / "more.yml")], "+ PI": ["rope_scaling={rope_type: linear, factor: 2}"]}
    models = {"RoFormer": {"set": ["pos_emb=rotary"], "variants": variants}}
    other = cells_of(write(models=models))[0].measurements
    same = {path for path in plain if plain[path] == other[path]}
    assert same == {Path("perplexity_roformer.json")} and len(other) == 3
    tasks = {"perplexity": {"windows": ["1L"], "stride": "1L"}}
    assert not set(cells_of(write(tasks=tasks))[0].measurements.values()) & set(plain.values())


def test_a_task_may_measure_some_variants(write: Write) -> None:
    plain = cells_of(write())
    arguments = plain[0].commands[0].arguments
    options = {"data": [arguments[arguments.index("--data") + 1]], "windows": ["1L"], "stride": "1L"}
    tasks = {"perplexity": options, "perplexity more": {**options, "variants": ["+ NTK"]}}
    roformer, *_, nope = cells_of(write(tasks=tasks))
    assert [len(command.files) for command in roformer.commands] == [2, 1]
    assert [str(path) for path in roformer.measurements] == [
        *("perplexity_roformer.json", "perplexity_roformer_ntk.json", "more/perplexity_roformer_ntk.json"),
    ]
    assert [command.task for command in nope.commands] == ["perplexity"], "it has no such variant"
    with pytest.raises(EvaluationError, match='tasks.perplexity.variants: .*known: "", "\\+ NTK"'):
        cells_of(write(tasks={"perplexity": {**options, "variants": ["NTK"]}}))


def test_changed_data_of_evaluations_make_results_incomplete(write: Write, corpus: Path, tmp_path: Path) -> None:
    """Named by the task, or by the run; tasks without files have no digest."""
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}/words_test{suffix}", tmp_path / f"test{suffix}")
    text, prefix = tmp_path / "haystack.txt", str(tmp_path / "test")
    text.write_text("A sentence. Another one.")
    perplexity = {"windows": ["1L"], "stride": "1L"}
    tasks = {
        "perplexity": perplexity | {"data": [prefix]},
        "perplexity default": perplexity,
        "needle": {"lengths": ["32L"], "haystack": [str(text)]},
        "passkey": {"lengths": ["32L"]},
    }

    def inputs() -> dict[str, str]:
        file = write({"test_data_paths": [prefix]}, tasks=tasks, models={"m": ["pos_emb=rotary"]}, baseline=None)
        (first, _) = cells_of(file)
        return {str(path): digest for path, digest in first.inputs.items()}

    before = inputs()
    assert before.keys() == {"perplexity_m.json", "default/perplexity_m.json", "needle_m.json"}
    assert inputs() == before
    data = bytearray((tmp_path / "test.bin").read_bytes())
    data[10] ^= 1
    (tmp_path / "test.bin").write_bytes(data)
    text.write_text("A sentence. Another two.")
    assert all(digest != before[name] for name, digest in inputs().items())
