"""GPT-NeoX's command lines, run as its users type them, do what our own commands do, byte for byte."""

import contextlib
import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import torch

from megatron_coca import cli
from megatron_coca.config import load_config
from megatron_coca.model import build_model
from tests.checkpoint_files import TINY, talkative_model, write_checkpoint
from tests.conftest import clean_environment
from tests.neox_files import write_neox
from tests.patience import patience
from tests.unit.evaluation.harness_cases import write_tasks

ROOT = Path(__file__).parents[3]
PREPROCESS, CONVERT = "tools/datasets/preprocess_data.py", "tools/ckpts/convert_neox_to_hf.py"
TEXTS = ["the sea was calm", "a boat", "the sea was calm", "wind and waves"]
NETWORK = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 16, "pos_emb": "rotary"}
NETWORK |= {"vocab_size": 128, "no_weight_tying": True, "pipe_parallel_size": 1, "gpt_j_residual": True}


def run(folder: Path, program: str, *arguments: object, status: int = 0) -> str:
    """Run a script of this checkout, or our command, in this process and in `folder`. Return its output."""
    shown, before, found = io.StringIO(), sys.argv, cast("object", None)
    sys.argv = [program, *map(str, arguments)]
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            try:
                if program == "megatron-coca":
                    found = cli.main(sys.argv[1:])
                else:
                    runpy.run_path(str(ROOT / program), run_name="__main__")
            except SystemExit as end:
                found = end.code
    finally:
        sys.argv = before
    assert found == status, shown.getvalue()
    return shown.getvalue()


def typed(folder: Path, program: str, *arguments: object, status: int = 0) -> str:
    """The same in a new process."""
    script = ["-m", "megatron_coca"] if program == "megatron-coca" else [str(ROOT / program)]
    environment = clean_environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *script, *map(str, arguments)]
    done = subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=patience(200)
    )
    assert done.returncode == status and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.stdout + done.stderr


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with a file of texts, and the files of a tokenizer of GPT-2's kind."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/sea.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "data/wind.jsonl").write_text(json.dumps({"text": "no wind"}) + "\n")
    characters = ["<|endoftext|>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ"]
    (tmp_path / "data/gpt2-vocab.json").write_text(json.dumps({text: number for number, text in enumerate(characters)}))
    (tmp_path / "data/gpt2-merges.txt").write_text("#version: 0.2\n")
    return tmp_path


def given(**changes: str) -> list[str]:
    """The arguments of GPT-NeoX's README, with tiny data."""
    options = {
        "input": "data/sea.jsonl,data/wind.jsonl",
        "output-prefix": "data/sea",
        "vocab-file": "data/gpt2-vocab.json",
    }
    options |= {"dataset-impl": "mmap", "tokenizer-type": "GPT2BPETokenizer", "merge-file": "data/gpt2-merges.txt"}
    options |= {"num-docs": "5", "workers": "2"} | changes
    return ["--append-eod", *(word for name, value in options.items() for word in (f"--{name}", value))]


def test_preprocess_data(corpus: Path) -> None:
    assert "\ndata_path: data/sea_text_document\n" in typed(corpus, PREPROCESS, *given())
    options = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "data/gpt2-vocab.json"]
    options += ["--merge-file", "data/gpt2-merges.txt", "--valid-fraction", "0", "--test-fraction", "0"]
    inputs = ["--input", "text=data/sea.jsonl", "text=data/wind.jsonl", "--duplicates", "keep"]
    run(corpus, "megatron-coca", "prepare", *inputs, "--output", "ours", *options)
    for suffix in (".bin", ".idx"):
        shard = (corpus / f"data/sea_text_document{suffix}").read_bytes()
        assert shard == (corpus / f"ours/text_train{suffix}").read_bytes() and shard
    shown = run(corpus, "megatron-coca", "inspect", "lengths", "data/sea_text_document", "--json", "facts.json")
    (facts,) = json.loads((corpus / "facts.json").read_text()).values()
    assert facts["documents"] == 5 and facts["tokens"] == sum(len(text) + 1 for text in [*TEXTS, "no wind"]), shown
    again = files_of(corpus / "data")
    run(corpus, PREPROCESS, *("--vocab" if word == "--vocab-file" else word for word in given()))  # as in its README
    assert files_of(corpus / "data") == again, "the same command is done already"


def test_a_run_reads_what_preprocess_data_wrote(corpus: Path) -> None:
    """GPT-NeoX's train.py -d configs MODEL local_setup, whose data_path is the prefix."""
    run(corpus, PREPROCESS, *given())
    keys = {"data-path": "data/sea_text_document", "vocab-file": "data/gpt2-vocab.json", "split": "100,0,0"}
    (corpus / "configs").mkdir()
    (corpus / "configs/local_setup.yml").write_text(
        json.dumps(keys | {"merge-file": "data/gpt2-merges.txt", "save": "checkpoints", "distributed-backend": "gloo"})
    )
    train = {"train_iters": 1, "train_micro_batch_size_per_gpu": 1, "optimizer": {"params": {"lr": 0.1}}}
    model = {name: value for name, value in NETWORK.items() if name != "vocab_size"} | train
    (corpus / "configs/19M.yml").write_text(json.dumps(model))
    line = ["-d", "configs", "19M", "local_setup"]
    typed(corpus, "train.py", *line)
    assert "vocab_size: 97\n" in (corpus / "checkpoints/global_step1/config.yml").read_text()
    assert "it is 97, that of the tokenizer" in run(corpus, "megatron-coca", "estimate", *line)
    assert "sea_text_document" in run(corpus, "megatron-coca", "inspect", "mixture", *line)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ftfy"], "--ftfy: not supported; repair the texts first"),
        (["--dataset-impl", "cached"], "--dataset-impl cached: not supported; use mmap"),
        (["--jsonl-keys", "text", "title"], "run the command once for each key"),
        (["--input", "data/none.jsonl"], "megatron-coca prepare: "),
    ],
)
def test_what_preprocess_data_cannot_do(more: list[str], message: str, corpus: Path) -> None:
    assert message in run(corpus, PREPROCESS, *given(), *more, status=2)
    assert not (corpus / "data/sea_text_document.bin").exists()


def test_documents_always_end_with_their_token(corpus: Path) -> None:
    assert "--append-eod: not set, but documents always end" in run(corpus, PREPROCESS, *given()[1:], status=2)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A step folder of GPT-NeoX, with the YAML file of its model beside the save folder."""
    torch.manual_seed(0)
    network = {name: value for name, value in NETWORK.items() if not name.endswith("parallel_size")}
    folder = write_neox(tmp_path / "checkpoints", NETWORK, build_model(load_config([], network)).state_dict())
    (tmp_path / "model.yml").write_text((folder / "configs/model.yml").read_text())
    return folder


@pytest.mark.parametrize(("precision", "dtype"), [("auto", None), ("bf16", "bfloat16")])
def test_convert_neox_to_hf(precision: str, dtype: str | None, theirs: Path, tmp_path: Path) -> None:
    line = ["--input_dir", theirs, "--config_file", "model.yml", "--output_dir", "theirs/hf"]
    run(tmp_path, CONVERT, *line, "--precision", precision, "--architecture", "neox")
    run(tmp_path, "megatron-coca", "export", "huggingface", theirs, "ours/hf", *(["--dtype", dtype] if dtype else []))
    wanted = files_of(tmp_path / "ours/hf")
    assert files_of(tmp_path / "theirs/hf") == wanted and "model.safetensors" in wanted


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--pad-token-id", "0"], "--pad-token-id: not supported: .*config.json"),
        (["--vocab-is-hf-tokenizer"], "--vocab-is-hf-tokenizer: not supported: .* --tokenizer"),
        (["--config_file", "none.yml"], "none.yml: no such file"),
        (["--config_file", "wider.yml"], "hidden_size"),
    ],
)
def test_what_the_converter_cannot_do(more: list[str], message: str, theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "wider.yml").write_text((tmp_path / "model.yml").read_text().replace("size: 16", "size: 32"))
    line = ["--input_dir", theirs, "--output_dir", "out", "--config_file", "model.yml"]
    assert re.search(message, run(tmp_path, CONVERT, *line, *more, status=2))
    assert not (tmp_path / "out").exists()


def test_another_architecture_is_named(theirs: Path, tmp_path: Path) -> None:
    line = ["--input_dir", theirs, "--output_dir", "out", "--architecture", "llama"]
    assert "llama: the model is of type gpt_neox" in run(tmp_path, CONVERT, *line)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A folder with a run, and configurations of GPT-NeoX's kind that name it."""
    config = load_config([], TINY)
    write_checkpoint(tmp_path / "checkpoints", config, talkative_model(config).state_dict())
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/tiny.yml").write_text(json.dumps(TINY))
    (tmp_path / "configs/local_setup.yml").write_text(json.dumps({"load": "checkpoints", "save": "checkpoints"}))
    generation = {"text_gen_type": "input-file", "maximum_tokens": 8, "top_p": 0.0, "temperature": 0.0}
    (tmp_path / "configs/text_generation.yml").write_text(json.dumps(generation | {"prompt_end": "\n"}))
    (tmp_path / "prompts.txt").write_text("the sea\na boat\n")
    return tmp_path


def test_generate(trained: Path) -> None:
    names = ["-d", "configs", "tiny", "local_setup", "text_generation"]
    run(trained, "tools/generate.py", *names, "-i", "prompts.txt", "-o", "theirs.txt")
    ours = ["--checkpoint", "checkpoints", "--file", "prompts.txt", "--max-new-tokens", 8, "--output", "ours.txt"]
    run(trained, "megatron-coca", "generate", *ours)
    assert (trained / "theirs.txt").read_bytes() == (trained / "ours.txt").read_bytes() != b""


def test_eval(trained: Path) -> None:
    """All figures are those of lm-eval; the files also have times and labels."""
    (trained / "tasks").mkdir()
    options = ["--device", "cpu", "--limit", 2, "--include-path", write_tasks(trained / "tasks")]
    names = ["-d", "configs", "tiny", "local_setup", "--eval_tasks", "local_choice", "local_until"]
    run(trained, "tools/eval.py", *names, "--iteration", 7, "--eval_results_prefix", "theirs", *options)
    line = ["--checkpoint", "checkpoints", "--tasks", "local_choice,local_until", "--output", "ours.json", *options]
    run(trained, "megatron-coca", "evaluate", "lm-eval", *line)
    theirs, ours = (json.loads((trained / name).read_text()) for name in ("theirs_eval_results.json", "ours.json"))
    assert theirs.pop("label") == "tiny + local_setup + iteration=7" and ours.pop("label") == "checkpoints"
    assert theirs["results"] == ours["results"] and len(ours["results"]) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "--eval_tasks", "piqa"], "load: not set; "),
        (["none", "--eval_tasks", "piqa"], "configs/none.yml: no such file"),
        (["tiny"], "the following arguments are required: --eval_tasks"),
    ],
)
def test_what_eval_needs(arguments: list[str], message: str, trained: Path) -> None:
    assert message in run(trained, "tools/eval.py", "-d", "configs", *arguments, status=2)
