"""evaluate.py on a small checkpoint: command line to result file, and every user error as one message."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_coca.checkpoints import native
from megatron_coca.config import load_config
from megatron_coca.data import load_tokenizer
from megatron_coca.evaluation import PerplexityResult
from megatron_coca.model import GPT, build_model

main = runpy.run_path(str(Path(__file__).parents[2] / "evaluate.py"))["main"]

MODEL = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 512}
MODEL |= {"no_weight_tying": True, "pos_emb": "coca", "tokenizer_type": "CharLevelTokenizer"}


def save_checkpoint(save: Path, **changes: object) -> Path:
    config = load_config([], {**MODEL, **changes})
    folder = native.begin(save, 7)
    save_file(build_model(config).state_dict(), folder / native.WEIGHTS)
    (folder / native.CONFIG).write_text(config.to_yaml())
    (folder / native.META).write_text(json.dumps({"step": 7}))
    load_tokenizer("CharLevelTokenizer").save(folder / native.TOKENIZER)
    for name in ("state/rank_00000.safetensors", "rng/rank_0.pt"):  # needed to be complete, and not read here
        (folder / name).parent.mkdir()
        (folder / name).touch()
    native.commit(save, 7)
    return save


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    documents = ["too short", "It is a truth universally acknowledged. " * 4, "Call me Ishmael, some years ago. " * 5]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


def arguments(checkpoint: Path, text: Path, *more: object) -> list[str]:
    base = ["perplexity", "--checkpoint", checkpoint, "--data", text, "--windows", "16,64", "--stride", "8"]
    return [str(argument) for argument in [*base, "--device", "cpu", *more]]


def test_perplexity_then_report(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, extended = tmp_path / "results" / "plain.json", tmp_path / "results" / "extended.json"
    assert main(arguments(checkpoint, text, "--output", plain, "--label", "plain", "--max-length", 128)) == 0
    overrides = ["--set", "rope_scaling.rope_type=dynamic", "rope_scaling.factor=4"]
    assert main(arguments(checkpoint, text, "--output", extended, "--max-length", 128, *overrides)) == 0
    one, other = (PerplexityResult.model_validate_json(path.read_bytes()) for path in (plain, extended))
    assert [each.tokens_scored for each in one.results] == [2 * 127, 2 * 127]
    assert one.results[0].nll == other.results[0].nll, "no extension up to the training length"
    assert one.results[1].nll != other.results[1].nll
    assert (one.checkpoint.step, one.checkpoint.seq_length, one.checkpoint.pos_emb) == (7, 16, "coca")
    assert one.checkpoint.identity == other.checkpoint.identity and one.documents == other.documents
    assert other.overrides == overrides[1:] and other.label.endswith("rope_scaling.factor=4")
    assert one.tokenizer == load_tokenizer("CharLevelTokenizer").fingerprint
    assert (one.environment.dtype, one.environment.device) == ("float32", "cpu")
    capsys.readouterr()
    assert main(["report", str(plain), str(extended), "--output", str(tmp_path / "report")]) == 0
    assert "| plain " in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.json", "report.png"}


def test_results_do_not_depend_on_the_order_of_windows(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    dynamic = ["--set", "rope_scaling.rope_type=dynamic", "--set", "rope_scaling.factor=2"]
    found = []
    for windows in ("16,32,64", "64,16,32"):
        output = tmp_path / f"{windows}.json"
        assert main(arguments(checkpoint, text, "--output", output, *dynamic, "--windows", windows)) == 0
        result = PerplexityResult.model_validate_json(output.read_bytes())
        found.append({each.window: each.nll for each in result.results})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--checkpoint", "absent"], "absent"),
        (["--windows", "4"], "window 4 is shorter than the stride 8"),
        (["--windows", "16,1024"], "no document has the 1024 tokens"),
        (["--max-length", "32"], "--max-length 32 is shorter than the window 64"),
        (["--data", "absent"], "absent: no text file or folder is there"),
        (["--set", "rope_scaling.rope_typ=dynamic"], "rope_typ"),
        (["--set", "hidden_size=64"], "hidden_size"),
        (["--device", "abacus"], "device abacus: cannot be used here"),
        (["--output", "."], ".: is a folder"),
        (["--output", "/proc/nowhere/result.json"], "/proc/nowhere/result.json: cannot be written"),
    ],
)
def test_user_errors_are_one_message(
    checkpoint: Path, text: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(checkpoint, text, *more)) == 2
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    "more", [["--windows", "16,x"], ["--stride", "0"], ["--num-documents", "-1"], ["--window", "9"]]
)
def test_malformed_numbers_stop_at_the_command_line(
    checkpoint: Path, text: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments(checkpoint, text, *more))
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_interruption_keeps_the_windows_before(
    checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compute = GPT.hidden_states

    def limited(self: GPT, input_ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        if input_ids.shape[1] > 16:
            raise torch.OutOfMemoryError("out of memory")
        return compute(self, input_ids, positions)

    monkeypatch.setattr(GPT, "hidden_states", limited)
    output = tmp_path / "result.json"
    assert main(arguments(checkpoint, text, "--output", output)) == 2
    assert "window 64: the memory of cpu does not suffice; lower --tokens-per-batch" in capsys.readouterr().err
    assert [each.window for each in PerplexityResult.model_validate_json(output.read_bytes()).results] == [16]
