"""evaluate.py on a small checkpoint: result files, and one message for every user error."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from megatron_coca.commands.evaluate import main
from megatron_coca.config import load_config
from megatron_coca.data import load_tokenizer
from megatron_coca.evaluation import PerplexityResult, chosen_dtype
from megatron_coca.evaluation.results import Missing, cost_path, read_costs, write_record
from megatron_coca.evaluation.tasks.perplexity import measure as perplexity
from megatron_coca.evaluation.tasks.perplexity.measure import score_document
from megatron_coca.model import GPT
from tests.checkpoint_files import beginning_tokenizer, write_checkpoint

MODEL = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 512}
MODEL |= {"no_weight_tying": True, "pos_emb": "coca", "tokenizer_type": "CharLevelTokenizer"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("run"), load_config([], MODEL))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    documents = ["too short", "It is a truth universally acknowledged. " * 4, "Call me Ishmael, some years ago. " * 5]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


def arguments(checkpoint: Path, text: Path, *more: object) -> list[str]:
    base = ["perplexity", "--checkpoint", checkpoint, "--data", text, "--windows", "16,64", "--stride", "8"]
    return [str(argument) for argument in [*base, "--device", "cpu", *more]]


@pytest.mark.always
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
    assert one.checkpoint.seed == 1234, "of the training configuration"
    assert one.checkpoint.identity == other.checkpoint.identity and one.documents == other.documents
    assert other.label.endswith("rope_scaling.factor=4") and one.overrides == {}
    scaling = other.overrides["rope_scaling"]
    assert isinstance(scaling, dict) and (scaling["rope_type"], scaling["factor"]) == ("dynamic", 4.0)
    assert one.tokenizer == load_tokenizer("CharLevelTokenizer").fingerprint
    assert (one.environment.dtype, one.environment.device) == ("float32", "cpu")
    capsys.readouterr()
    assert main(["report", str(plain), str(extended), "--output", str(tmp_path / "report")]) == 0
    assert "| plain " in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        *("figures", "tables", "results.csv", "results.json"),
        *(f"report.{suffix}" for suffix in ("html", "md", "ipynb")),
    }


VARIANTS = {
    "plain": ["--variant", "plain"],
    "NTK 4": ["--variant", "NTK 4", "configs/extend/dynamic_ntk.yml"],
    "ReRoPE": ["--variant", "ReRoPE", "relative_positions.type=rerope", "relative_positions.window=8"],
}


def test_files_do_not_depend_on_the_order_of_windows_and_variants(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    orders = {"one": ("16,32,64", ["plain", "NTK 4", "ReRoPE"]), "two": ("64,16,32", ["ReRoPE", "plain", "NTK 4"])}
    for name, (windows, labels) in orders.items():
        given = [part for label in labels for part in VARIANTS[label]]
        assert main(arguments(checkpoint, text, "--output", tmp_path / name, *given, "--windows", windows)) == 0
    files = sorted(path.name for path in (tmp_path / "one").iterdir() if not path.name.endswith(".cost.json"))
    assert files == ["perplexity_ntk_4.json", "perplexity_plain.json", "perplexity_rerope.json"]
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    nlls = [read(tmp_path / "one" / file).results[2].nll for file in files]
    assert len(set(nlls)) == 3, "each variant uses the weights in its own way"


def test_variants_are_compared_in_one_table_and_windows_may_be_multiples(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [part for label in ("plain", "ReRoPE") for part in VARIANTS[label]]
    given[-1] = "relative_positions.window=1L/2"
    assert (
        main(arguments(checkpoint, text, "--output", tmp_path, *given, "--windows", "1L,4L", "--stride", "1L/2")) == 0
    )
    shown = capsys.readouterr()
    assert shown.out.count("| perplexity at window |") == 1, "one table with a row for each variant"
    rows = [line.split("|")[1].strip() for line in shown.out.splitlines() if line.startswith("| ")]
    assert rows[2:4] == ["plain", "ReRoPE"]
    assert all(f"{label}, window 64: 0/" in shown.err for label in ("plain", "ReRoPE")) and "windows" in shown.err
    found = read(tmp_path / "perplexity_rerope.json")
    assert [each.window for each in found.results] == [16, 64] and found.protocol.stride == 8
    assert found.overrides["relative_positions"] == {"type": "rerope", "window": 8}
    assert main(arguments(checkpoint, text, "--windows", "1L/3")) == 2
    assert re.search("1L/3: .*training length of 16", capsys.readouterr().err)


@pytest.mark.parametrize(("gain", "chosen"), [(1.1, "float32"), (2.0, "bfloat16")])
def test_the_dtype_is_measured_and_kept_on_resume(
    gain: float,
    chosen: str,
    checkpoint: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = arguments(checkpoint, text, "--output", tmp_path / "result.json", "--dtype", "auto")
    times = itertools.cycle([gain, 1.0])  # float32 and bfloat16 in turn
    monkeypatch.setattr(chosen_dtype, "_seconds", lambda run, device: next(times))
    assert main(given) == 0
    assert read(tmp_path / "result.json").environment.dtype == chosen
    assert f"--dtype auto: {chosen} (a product and attention" in capsys.readouterr().err
    times = itertools.cycle([3.0 - gain, 1.0])
    assert main(given) == 0, "resumed with the same dtype"
    assert f"--dtype auto: {chosen}, as in the results so far" in capsys.readouterr().err


def test_text_of_a_model_that_learned_facts_too(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"task": "recall", "text": True, "filler_tokens": 512, "loss": "all"}
    model = MODEL | {"synthetic": task, "data_path": "unused", "vocab_size": 800}
    checkpoint, output = write_checkpoint(tmp_path / "run", load_config([], model)), tmp_path / "result.json"
    assert main(arguments(checkpoint, text, "--output", output)) == 0
    assert "add --vocabulary 512" in caplog.text
    whole = read(output)
    assert main(arguments(checkpoint, text, "--output", output, "--vocabulary", 512)) == 2
    assert "different protocol.vocabulary" in capsys.readouterr().err
    caplog.clear()
    assert main(arguments(checkpoint, text, "--output", output, "--vocabulary", 512, "--overwrite")) == 0
    alone = read(output)
    assert "--vocabulary" not in caplog.text and alone.protocol.vocabulary == 512
    assert "stride 8, softmax over the ids below 512 only, 2 documents" in capsys.readouterr().out
    assert all(one.nll < other.nll for one, other in zip(alone.results, whole.results, strict=True))
    assert main(arguments(checkpoint, text, "--vocabulary", 64)) == 2
    assert "vocabulary 64: the documents contain the token id" in capsys.readouterr().err


def test_a_start_token_is_named_and_put_on_request(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config([], MODEL | {"vocab_size": 97, "tokenizer_type": "HFTokenizer"})
    checkpoint = write_checkpoint(tmp_path / "run", config, tokenizer=beginning_tokenizer(tmp_path))
    assert main(arguments(checkpoint, text, "--output", tmp_path / "plain.json")) == 0
    assert re.search("adds <bos> .*add --start-token '<bos>'", caplog.text)
    caplog.clear()
    begun = arguments(checkpoint, text, "--output", tmp_path / "begun.json", "--start-token", "<bos>")
    assert main(begun) == 0 and "--start-token" not in caplog.text
    assert "2 documents, each after the token 0" in capsys.readouterr().out
    plain, with_start = read(tmp_path / "plain.json"), read(tmp_path / "begun.json")
    assert (plain.documents.start, with_start.documents.start) == (None, 0)
    assert plain.documents.sha256 != with_start.documents.sha256 and plain.results[0].nll != with_start.results[0].nll
    assert main(arguments(checkpoint, text, "--start-token", "<start>")) == 2
    assert "no symbol '<start>'" in capsys.readouterr().err


def read(path: Path) -> PerplexityResult:
    return PerplexityResult.model_validate_json(path.read_bytes())


def test_an_interrupted_measurement_goes_on(
    checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, whole = tmp_path / "result.json", tmp_path / "whole.json"
    assert main(arguments(checkpoint, text, "--output", whole)) == 0
    calls = []

    def interrupted(*args: object) -> float:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(args)
        return score_document(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(perplexity, "score_document", interrupted)
    assert main(arguments(checkpoint, text, "--output", output)) == 130
    assert [(each.window, each.documents) for each in read(output).results] == [(16, 2), (64, 1)]
    monkeypatch.setattr(perplexity, "score_document", lambda *args: calls.append(args) or score_document(*args))
    assert main(arguments(checkpoint, text, "--output", output)) == 0
    assert len(calls) == 4, "only the document that was not measured"
    assert output.read_bytes() == whole.read_bytes()
    costs = read_costs(output)
    assert costs is not None and [(cost.at, cost.tokens) for cost in costs.costs] == [
        ("window 16", 126),
        ("window 64", 126),
    ]


def test_another_measurement_is_not_overwritten_unasked(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    assert main(arguments(checkpoint, text, "--output", output)) == 0
    before = output.read_bytes()
    assert main(arguments(checkpoint, text, "--output", output, "--stride", 16)) == 2
    assert "contains another measurement (different protocol.stride)" in capsys.readouterr().err
    assert output.read_bytes() == before
    assert main(arguments(checkpoint, text, "--output", output, "--stride", 16, "--overwrite")) == 0
    assert read(output).protocol.stride == 16


def test_an_unsupported_variant_is_noted_and_the_others_go_on(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--variant", "T5", "pos_emb=rpe", "--variant", "plain", "--output", tmp_path]
    assert main(arguments(checkpoint, text, *given)) == 2
    refused, plain = read(tmp_path / "perplexity_t5.json"), read(tmp_path / "perplexity_plain.json")
    assert [each.window for each in plain.results] == [16, 64] and not plain.missing
    assert refused.results == [] and [(each.at, each.kind) for each in refused.missing] == [("all", "refused")]
    assert "pos_emb" in refused.missing[0].reason and "T5: all: not supported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--variant", "a", "--variant", "A"], "a: duplicate name; give each variant its own"),
        (["--variant", "a", "--variant", "b", "--output", "x.json"], "several variants; name a folder"),
        (["--variant", "a", "ntk"], "--variant a: no such file: ntk.yml"),
        (["--variant", "a", "absent.yml"], "no such file: absent.yml"),
        (["--variant", " "], "empty name"),
        (["--variant", "a", "rope_scalin.factor=2"], "rope_scalin: unknown key"),
    ],
)
def test_variants_that_cannot_be_are_named(
    checkpoint: Path, text: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(checkpoint, text, *more)) == 2
    assert message in capsys.readouterr().err


def test_what_is_missing_stays_until_it_is_measured(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    assert main(arguments(checkpoint, text, "--output", output)) == 0
    complete = output.read_bytes()
    found = read(output)
    lacking = [Missing(at=at, kind="failed", reason="x") for at in ("all", "window 16", "window 99")]
    write_record(output, found.model_copy(update={"missing": lacking, "results": found.results[1:]}))
    assert main(arguments(checkpoint, text, "--output", output)) == 0
    assert [each.at for each in read(output).missing] == ["window 99"], "nobody asked for that one"
    write_record(output, read(output).model_copy(update={"missing": []}))
    assert output.read_bytes() == complete


def test_damaged_costs_cost_nothing(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    cost_path(output).write_text("{")
    given = ["--output", output, "--max-length", 64]
    assert main(arguments(checkpoint, text, *given, "--windows", "16")) == 0
    cost_path(output).write_text("{")
    assert main(arguments(checkpoint, text, *given)) == 0
    assert [each.window for each in read(output).results] == [16, 64]


def test_a_long_label(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    for ending in "ab":
        given = ["--label", "ü" * 300 + ending, "--output", tmp_path, "--windows", "16"]
        assert main(arguments(checkpoint, text, *given)) == 0
    assert len([path for path in tmp_path.iterdir() if not path.name.endswith(".cost.json")]) == 2


def test_bfloat16(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        assert main(arguments(checkpoint, text, "--output", tmp_path / f"{dtype}.json", "--dtype", dtype)) == 0
    exact, rounded = (read(tmp_path / f"{dtype}.json") for dtype in ("float32", "bfloat16"))
    assert rounded.environment.dtype == "bfloat16"
    for one, other in zip(exact.results, rounded.results, strict=True):
        assert one.nll != other.nll and other.nll == pytest.approx(one.nll, abs=0.02)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--checkpoint", "absent"], "absent"),
        (["--windows", "4"], "window 4: is shorter than the stride 8"),
        (["--windows", "16,1024"], "no document has the required 1024 tokens"),
        (["--max-length", "32"], "--max-length 32: must be at least 64"),
        (["--data", "absent"], "absent: no such text file, folder or shard"),
        (["--set", "rope_scaling.rope_typ=dynamic"], "rope_typ"),
        (["--set", "hidden_size=64"], "hidden_size"),
        (["--device", "abacus"], "device abacus: cannot be used here"),
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


def test_a_window_that_does_not_fit_is_noted(
    checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compute = GPT.hidden_states

    def limited(self: GPT, input_ids: torch.Tensor, last: int) -> torch.Tensor:
        if input_ids.shape[1] > 16:
            raise torch.OutOfMemoryError("out of memory")
        return compute(self, input_ids, last=last)

    monkeypatch.setattr(GPT, "hidden_states", limited)
    output = tmp_path / "result.json"
    assert main(arguments(checkpoint, text, "--output", output)) == 2
    found = read(output)
    assert [each.window for each in found.results] == [16]
    assert [(each.at, each.kind) for each in found.missing] == [("window 64", "out of memory")]
    assert re.search("window 64: out of memory: .*lower --tokens-per", capsys.readouterr().err)
    monkeypatch.setattr(GPT, "hidden_states", compute)
    assert main(arguments(checkpoint, text, "--output", output)) == 0, "tried again, and only that"
    assert [each.window for each in read(output).results] == [16, 64] and not read(output).missing


LIMITED = {
    "learned": ({"max_position_embeddings": 40}, "float32", "window 64", "40 learned positions"),
    "xpos": ({}, "float16", "window 8192", "xpos overflows torch.float16 at 8191 tokens"),
}


@pytest.mark.parametrize("name", LIMITED)
def test_a_window_beyond_the_positions_of_a_model_is_an_error_and_the_others_go_on(
    name: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, dtype, at, reason = LIMITED[name]
    window = int(at.split()[1])
    (tmp_path / "book.txt").write_text("It is a truth universally acknowledged. " * (window // 20))
    run = write_checkpoint(tmp_path / "run", load_config([], MODEL | keys | {"pos_emb": name}))
    given = [*arguments(run, tmp_path / "book.txt", "--dtype", dtype), "--windows", f"16,{window}", "--stride", "16"]
    folder = tmp_path / "results"
    options = [
        "--num-documents",
        "1",
        "--output",
        str(folder),
        "--variant",
        "a",
        "--variant",
        "b",
        "attention_backend=sdpa",
    ]
    assert main([*given, *options]) == 2
    shown = capsys.readouterr().err
    assert f"a: {at}: not supported: " in shown and reason in shown
    for label in ("a", "b"):
        result = read(folder / f"perplexity_{label}.json")
        assert [each.window for each in result.results] == [16]
        assert [(each.at, each.kind) for each in result.missing] == [(at, "refused")] and reason in result.missing[
            0
        ].reason
    assert main(["report", str(folder), "--output", str(tmp_path / "report")]) == 0
    assert "not supported" in capsys.readouterr().out


def test_an_analysis_beyond_the_positions_of_a_model_is_an_error(text: Path, tmp_path: Path) -> None:
    keys = {"pos_emb": "learned", "max_position_embeddings": 40}
    run = write_checkpoint(tmp_path / "run", load_config([], MODEL | keys))
    given = [
        "analyse",
        "--checkpoint",
        run,
        "--data",
        text,
        "--lengths",
        "16,64",
        "--num-documents",
        1,
        "--device",
        "cpu",
    ]
    assert main([str(each) for each in [*given, "--output", tmp_path / "analysis.json"]]) == 2
    found = json.loads((tmp_path / "analysis.json").read_text())
    assert [each["length"] for each in found["results"]] == [16]
    assert [(each["at"], each["kind"]) for each in found["missing"]] == [("length 64", "refused")]
