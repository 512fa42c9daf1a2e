"""CoCA for a small LLaMA from start to end: trained with RoPE, exported, imported, fine-tuned in three stages,
exported, and loaded by transformers.
"""

import json
import os
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from megatron_coca import load_model
from megatron_coca.checkpoints import open_checkpoint
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.importing import import_checkpoint
from megatron_coca.data import CorpusSource, Execution, Rules, SourceSpec, load_tokenizer, prepare
from megatron_coca.evaluation import sliding_window_perplexity
from megatron_coca.work.processes import PROGRAM
from tests.conftest import LAUNCHER_VARIABLES, ROOT, VOCABULARY, command_line
from tests.plain_perplexity import plain_loop

pytestmark = pytest.mark.slow  # fast: test_run_stages.py and test_trained_parts.py

CONFIGS = ROOT / "configs/finetune/small"
RUNS = Path("runs/finetune")
LENGTH = 64
WINDOWS = [LENGTH, 2 * LENGTH, 4 * LENGTH, 8 * LENGTH]
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
SMALLER: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 384,
    "train_micro_batch_size_per_gpu": 16,
    "tokenizer_type": "CharLevelTokenizer",
    "vocab_size": 512,
    "eval_interval": 1000,
    "log_interval": 10,
}
STEPS = {"llama": 240, "stage": 80}
QKV = ".attention.query_key_value.weight"
HEADS, HEAD_DIM = 4, 16


@dataclass(frozen=True)
class Chain:
    """What the chain has left."""

    folder: Path
    documents: list[np.ndarray]

    def weights(self, name: str) -> dict[str, Tensor]:
        """The weights of one of its checkpoints."""
        return dict(open_checkpoint(self.folder / RUNS / name).weights())

    def perplexities(self, name: str, windows: list[int], **keys: Any) -> list[float]:
        """By window."""
        model = load_model(self.folder / RUNS / name, keys)
        found = sliding_window_perplexity(model, self.documents, windows, LENGTH, progress=False)
        return [cell.perplexity for cell in found]

    def losses(self, name: str) -> list[float]:
        """The training losses that were reported."""
        lines = (self.folder / RUNS / name / "metrics.jsonl").read_text().splitlines()
        return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    folder = tmp_path_factory.mktemp("chain")
    keys = SMALLER | shards(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
            patch.delenv(name)
        patch.setenv("OMP_NUM_THREADS", "1")
        base = command_line(keys | {"train_iters": STEPS["llama"], "checkpoint_factor": STEPS["llama"]})
        train("llama.yml", base)
        export(RUNS / "llama", RUNS / "llama_hf")
        import_checkpoint(RUNS / "llama_hf", RUNS / "imported")
        short = command_line(keys | {"train_iters": STEPS["stage"], "checkpoint_factor": STEPS["stage"]})
        for number in (1, 2, 3):
            train(f"coca_stage{number}.yml", short)
        export(RUNS / "stage3", RUNS / "llama_coca_hf")
        yield Chain(folder, held_out())


def train(name: str, keys: list[str]) -> None:
    subprocess.run([*PROGRAM, "train", str(CONFIGS / name), *keys], check=True)


def text(generator: random.Random) -> str:
    return " ".join(generator.choices(VOCABULARY.split(), k=400))


def shards(folder: Path) -> dict[str, Any]:
    """Keys of a corpus of 60 documents of 400 words."""
    folder.mkdir()
    generator = random.Random(0)
    lines = (json.dumps({"text": text(generator)}) + "\n" for _ in range(60))
    (folder / "words.jsonl").write_text("".join(lines))
    source = CorpusSource(SourceSpec("words", [folder / "words.jsonl"]))
    rules = Rules(valid_fraction=0, test_fraction=0.2)
    prepare([source], folder / "shards", load_tokenizer("CharLevelTokenizer"), rules, Execution(progress=False))
    names = {"train": "words_train", "valid": "words_test", "test": "words_test"}
    return {f"{split}_data_paths": [str(folder / "shards" / name)] for split, name in names.items()}


def held_out() -> list[np.ndarray]:
    tokenizer, generator = load_tokenizer("CharLevelTokenizer"), random.Random(1)
    return [np.array(tokenizer.encode(text(generator)), dtype=np.int64) for _ in range(2)]


def by_part(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The query, key and value rows of a packed projection."""
    return packed.view(HEADS, 3, HEAD_DIM, -1).unbind(1)


def test_the_llama_has_learned(chain: Chain) -> None:
    losses = chain.losses("llama")
    assert losses[0] > 4 and losses[-1] < 0.75, losses  # 16 words, spelled: 0.6 nats a letter are left to guess


def test_the_import_is_the_llama(chain: Chain) -> None:
    before, after = chain.weights("llama"), chain.weights("imported")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_stage_1_changes_the_t_projection_alone(chain: Chain) -> None:
    before, after = chain.weights("imported"), chain.weights("stage1")
    for name, weight in before.items():
        if not name.endswith(QKV):
            assert torch.equal(weight, after[name]), name
            continue
        for part, same, now in zip("qkv", by_part(weight), by_part(after[name]), strict=True):
            assert torch.equal(same, now) is (part != "k"), f"{part} of {name}"


def test_stage_2_changes_the_projections_of_attention_alone(chain: Chain) -> None:
    before, after = chain.weights("stage1"), chain.weights("stage2")
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) is not name.endswith(QKV), name


def test_stage_3_changes_everything(chain: Chain) -> None:
    before, after = chain.weights("stage2"), chain.weights("stage3")
    assert not [name for name in before if torch.equal(before[name], after[name])]


def test_the_stages_bring_the_model_back(chain: Chain) -> None:
    """CoCA dropped in without training breaks the model; every stage mends it, to what it was."""
    stages = [chain.losses(f"stage{number}") for number in (1, 2, 3)]
    base, (first, second, third) = chain.losses("llama")[-1], (losses[-1] for losses in stages)
    assert stages[0][0] > base + 0.3, "the first step is of a model that was never trained with CoCA"
    assert stages[0][0] - 0.2 > first > second > third - 0.05
    assert third < base + 0.15


def test_perplexity_within_and_beyond_the_training_length(chain: Chain) -> None:
    base = chain.perplexities("llama", WINDOWS)
    coca = chain.perplexities("stage3", WINDOWS)
    extended = chain.perplexities("stage3", WINDOWS, **DYNAMIC)
    assert coca[0] < 1.2 * base[0] and extended[0] == pytest.approx(coca[0])
    assert base[-1] > 1.5 * base[0], "RoPE alone does not reach eight times its length"
    assert extended[-1] < base[-1]


def test_transformers_finds_the_same_perplexity(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    folder = chain.folder / RUNS / "llama_coca_hf"
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    documents = [torch.from_numpy(document) for document in chain.documents]
    for window, ours in zip(WINDOWS, chain.perplexities("stage3", WINDOWS), strict=True):
        assert plain_loop(model, documents, window, LENGTH)[0] == pytest.approx(ours, rel=1e-5)


QWEN3 = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 12}
QWEN3 |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": LENGTH}
NEW = {"reset_optimizer": True}
ONE_STEP_EACH = [{"until": 1, "trainable": ["key"]}, {"until": 2, "trainable": ["query", "key", "value"]} | NEW, NEW]


@torch.no_grad()
def test_another_family_in_the_stages_for_any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Qwen 3 by configs/finetune/coca.yml; transformers continues a text beyond its training length as we do."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    AutoModelForCausalLM.from_config(Qwen3Config(**QWEN3)).save_pretrained(tmp_path / "qwen3")
    keys = shards(tmp_path / "data") | {"tokenizer_type": "CharLevelTokenizer", "save": str(tmp_path / "run")}
    keys |= {"train_iters": 3, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "stages": ONE_STEP_EACH}
    keys |= {"precision": "fp32", "zero_optimization": None, "distributed_backend": "gloo", "eval_iters": 1}
    files = [str(tmp_path / "qwen3"), str(ROOT / "configs/finetune/coca.yml")]
    subprocess.run([*PROGRAM, "train", *files, *command_line(keys)], check=True)
    done = export(tmp_path / "run", tmp_path / "exported")
    theirs = AutoModelForCausalLM.from_pretrained(done.folder, trust_remote_code=True).eval()
    ours, prompt = load_model(tmp_path / "run"), torch.arange(100, 100 + 2 * LENGTH)[None]
    answer = theirs.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=511)
    likeliest = ours(answer)[0, 2 * LENGTH - 1 : -1].argmax(-1)
    assert done.remote and torch.equal(likeliest, answer[0, 2 * LENGTH :])
    assert not torch.equal(load_model(tmp_path / "qwen3")(answer), ours(answer))
