"""The identity of a checkpoint is its content: another model has another identity, and a copy has the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_coca.checkpoints import load_checkpoint, open_checkpoint
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.identity import RANGE, RANGES
from megatron_coca.commands.evaluate import parser
from megatron_coca.evaluation import EvaluationError, PerplexityResult
from megatron_coca.evaluation.tasks.perplexity import measure as perplexity
from megatron_coca.evaluation.tasks.retrieval import cases as tasks
from megatron_coca.evaluation.tasks.retrieval import measure as retrieval_tasks
from megatron_coca.evaluation.tasks.retrieval.prompts import FILLER_HAYSTACK
from tests.parity.exported import LLAMA, random_checkpoint

SINGLE = "model.safetensors"
LARGE = LLAMA | {"num_layers": 1, "hidden_size": 128, "vocab_size": 4096, "intermediate_size": 312}
"""With an embedding and a head of 2 MiB, twice the size that is read whole."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("identity")
    return export(random_checkpoint(path / "run", **LARGE), path / "exported").folder


def change_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def change_tensor(name: str, place: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        tensors[name].view(-1)[place] += 1
        save_file(tensors, folder / SINGLE, {"format": "pt"})

    return change


def rename_tensor(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    up, gate = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    tensors[up], tensors[gate] = tensors[gate], tensors[up]
    save_file(tensors, folder / SINGLE, {"format": "pt"})


def rounded(folder: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / SINGLE).items()}
    save_file(tensors, folder / SINGLE, {"format": "pt"})


def fine_tuned(folder: Path) -> None:
    """Only one large matrix, by a step as small as at the end of a training."""
    tensors = load_file(folder / SINGLE)
    tensors["lm_head.weight"] *= 1 + 1e-6
    save_file(tensors, folder / SINGLE, {"format": "pt"})


CHANGES: dict[str, Callable[[Path], None]] = {
    "a norm": change_tensor("model.norm.weight", 77),
    "a small matrix": change_tensor("model.layers.0.mlp.up_proj.weight", 4321),
    "the head of a large one": change_tensor("lm_head.weight", 0),
    "its tail": change_tensor("lm_head.weight", -1),
    "all of a large one": fine_tuned,
    "two exchanged": rename_tensor,
    "another dtype": rounded,
    "epsilon": lambda folder: change_config(folder, rms_norm_eps=1e-3),
    "heads of the same width": lambda folder: change_config(
        folder, num_attention_heads=8, num_key_value_heads=8, head_dim=16
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_another_model(name: str, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / folder.name)
    assert open_checkpoint(copy).identity == open_checkpoint(folder).identity, "the same content at another path"
    CHANGES[name](copy)
    assert open_checkpoint(copy).identity != open_checkpoint(folder).identity


def test_how_the_content_is_written_does_not_matter(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "renamed")
    tensors = load_file(copy / SINGLE)
    (copy / SINGLE).unlink()
    parts = {f"model-0000{part}-of-00002.safetensors": sorted(tensors)[part - 1 :: 2] for part in (1, 2)}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, copy / file)
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (copy / f"{SINGLE}.index.json").write_text(json.dumps(index))
    change_config(copy, transformers_version="5.0", _name_or_path="elsewhere")
    (copy / "README.md").write_text("another card")
    assert open_checkpoint(copy).identity == open_checkpoint(folder).identity


@pytest.mark.parametrize("checksums", [True, False])
def test_pickled_weights(checksums: bool, folder: Path, tmp_path: Path) -> None:
    """PyTorch can write archives without checksums; then bytes of every tensor are read."""
    one, copy = (shutil.copytree(folder, tmp_path / name / "m") for name in ("one", "copy"))
    tensors = load_file(one / SINGLE)
    torch.serialization.set_crc32_options(checksums)
    try:
        for each in (one, copy):
            (each / SINGLE).unlink()
            torch.save(tensors, each / "pytorch_model.bin")
        assert open_checkpoint(one).identity == open_checkpoint(copy).identity != open_checkpoint(folder).identity
        tensors["model.layers.0.self_attn.o_proj.weight"][5, 5] += 1
        torch.save(tensors, copy / "pytorch_model.bin")
    finally:
        torch.serialization.set_crc32_options(True)
    assert open_checkpoint(one).identity != open_checkpoint(copy).identity


def test_large_tensors_are_sampled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of the module's docstring: 1 MiB of each tensor at most."""
    entries = open_checkpoint(folder).weights().entries.values()
    assert sum(entry.nbytes > RANGE * RANGES for entry in entries) == 2
    read: list[int] = []

    class Counted:
        def update(self, data: bytes) -> None:
            read.append(len(data))

        def hexdigest(self) -> str:
            return ""

    monkeypatch.setattr("megatron_coca.checkpoints.identity._begun", lambda config: Counted())
    assert open_checkpoint(folder).identity == ""
    assert sum(read) < sum(min(entry.nbytes, RANGE * RANGES) for entry in entries) + 10_000


# Result files ---------------------------------------------------------------------------------------------------------


def measured(checkpoint: Path, output: Path, text: Path) -> tuple[float, PerplexityResult]:
    options = ["--checkpoint", checkpoint, "--data", text, "--windows", "16", "--stride", "8", "--device", "cpu"]
    given = ["perplexity", *map(str, options), "--label", "m", "--output", str(output)]
    args = parser().parse_args(given)
    assert perplexity.run(args, lambda result: None) == 0
    result = PerplexityResult.model_validate_json((output / "perplexity_m.json").read_bytes())
    return result.results[0].nll, result


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"text": "It is a truth universally acknowledged. " * 2}) + "\n")
    return path


def scaled(folder: Path) -> None:
    tensors = {name: tensor * 1.5 for name, tensor in load_file(folder / SINGLE).items()}
    save_file(tensors, folder / SINGLE, {"format": "pt"})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    return export(random_checkpoint(path / "run", **LLAMA), path / "m").folder


def test_two_models_of_one_name_are_two_measurements(small: Path, text: Path, tmp_path: Path) -> None:
    """Also a folder that is written again in place; a copy elsewhere is the measurement that is there."""
    output = tmp_path / "results"
    first, _ = measured(small, output, text)
    copy = shutil.copytree(small, tmp_path / "run2" / small.name)
    again, result = measured(copy, output, text)
    assert again == first and result.checkpoint.path == str(copy)
    assert result.checkpoint.identity == load_checkpoint(small).identity
    scaled(copy)
    before = (output / "perplexity_m.json").read_bytes()
    with pytest.raises(EvaluationError, match="contains another measurement .different checkpoint.identity."):
        measured(copy, output, text)
    assert (output / "perplexity_m.json").read_bytes() == before
    assert measured(copy, tmp_path / "other", text)[0] != first


def test_the_same_weights_in_another_network(text: Path, tmp_path: Path) -> None:
    """The identity of our own checkpoints is that of their weights: the network has a digest of its own."""
    one, other = (
        random_checkpoint(tmp_path / name / "m", **LLAMA, rms_norm_epsilon=epsilon)
        for name, epsilon in (("one", 1e-6), ("other", 0.5))
    )
    assert open_checkpoint(one).identity == open_checkpoint(other).identity
    first, result = measured(one, tmp_path / "results", text)
    with pytest.raises(EvaluationError, match="different checkpoint.network"):
        measured(other, tmp_path / "results", text)
    earlier = result.model_copy(update={"checkpoint": result.checkpoint.model_copy(update={"network": None})})
    (tmp_path / "results" / "perplexity_m.json").write_text(earlier.model_dump_json())
    assert measured(one, tmp_path / "results", text)[0] == first, "files of earlier versions have no such digest"


def test_the_place_of_a_haystack_is_no_part_of_a_measurement(small: Path, text: Path, tmp_path: Path) -> None:
    """Its sentences are."""

    def needle(haystack: Path) -> int:
        options = ["--checkpoint", small, "--lengths", "400", "--cases", "1", "--depths", "50", "--device", "cpu"]
        given = [*options, "--max-new-tokens", "1", "--haystack", haystack, "--output", tmp_path / "needle.json"]
        args = parser().parse_args(["needle", *map(str, given)])
        return retrieval_tasks.needle(args, lambda result: None)

    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(text.read_bytes())
    assert needle(text) == needle(moved) == 0
    moved.write_text(json.dumps({"text": "Other words. " * 9}) + "\n")
    with pytest.raises(EvaluationError, match=r"contains another measurement .different protocol.haystack.sentences, "):
        needle(moved)


def test_the_words_of_prompts_belong_to_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [tasks.needle(50, FILLER_HAYSTACK), tasks.ruler("multi_key", FILLER_HAYSTACK), tasks.passkey()]
    before = [tasks.sample_digest([task]) for task in made]
    monkeypatch.setattr(tasks, "CITIES", tuple(f"{city}ville" for city in tasks.CITIES))
    monkeypatch.setattr(tasks, "NOUNS", tuple(f"{noun}s" for noun in tasks.NOUNS))
    after = [tasks.sample_digest([task]) for task in made]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, False, True]
