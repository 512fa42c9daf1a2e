"""Retrieval tasks on a small checkpoint: result files, variants, order, and missing results."""

import json
from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch

from megatron_coca.commands.evaluate import subcommands
from megatron_coca.config import load_config
from megatron_coca.evaluation.report.build import build_report
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.tasks.retrieval.task import NeedleResult, PasskeyResult, RulerResult
from megatron_coca.model import build_model
from tests.checkpoint_files import write_checkpoint

ROOT = Path(__file__).parents[3]
SHAPE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 256, "vocab_size": 512}


def save_checkpoint(save: Path, **changes: object) -> Path:
    config = load_config([], {**SHAPE, "no_weight_tying": True, "pos_emb": "coca", **changes})
    generator = torch.Generator().manual_seed(0)
    # As large as trained ones, so that what is generated depends on where things stand.
    weights = {
        name: weight + 0.3 * torch.randn(weight.shape, generator=generator)
        for name, weight in build_model(config).state_dict().items()
    }
    return write_checkpoint(save, config, weights)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("run"))


def evaluate(task: str, checkpoint: Path, *options: object) -> int:
    parser = ArgumentParser()
    subcommands()[task].add_arguments(parser)
    given = ["--checkpoint", checkpoint, "--device", "cpu", "--cases", 2, "--max-new-tokens", 6, *options]
    return subcommands()[task].run(parser.parse_args([str(each) for each in given]))


def variants(*labels: str) -> list[str]:
    changes = {
        "plain": [],
        "NTK": [str(ROOT / "configs/extend/dynamic_ntk.yml")],
        "ReRoPE": ["relative_positions.type=rerope", "relative_positions.window=64"],
    }
    return [part for label in labels for part in ("--variant", label, *changes[label])]


OPTIONS = {
    "passkey": [],
    "needle": ["--depths", "0,100"],
    "ruler": ["--tasks", "multi_query,variable_tracking"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_files_do_not_depend_on_the_order_of_lengths_and_variants(name: str, checkpoint: Path, tmp_path: Path) -> None:
    options = OPTIONS[name]
    one, two = tmp_path / "one", tmp_path / "two"
    labels = ["plain", "NTK", "ReRoPE"]
    assert evaluate(name, checkpoint, "--lengths", "512,640", "--output", one, *options, *variants(*labels)) == 0
    assert evaluate(name, checkpoint, "--lengths", "640,512", "--output", two, *options, *variants(*labels[::-1])) == 0
    files = sorted(path.name for path in one.iterdir() if not path.name.endswith(".cost.json"))
    assert files == [f"{name}_{label}.json" for label in ("ntk", "plain", "rerope")]
    for file in files:
        assert (one / file).read_bytes() == (two / file).read_bytes()
    answers = {(one / file).read_text().split('"results"')[1] for file in files}
    assert len(answers) == 3, "each variant uses the weights in its own way"


def test_the_passkey_file_says_all_that_a_report_needs(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "passkey.json"
    assert evaluate("passkey", checkpoint, "--lengths", "200,400,900", "--output", path) == 2, "one length has no room"
    output = capsys.readouterr()
    result = PasskeyResult.model_validate_json(path.read_bytes())
    assert [(each.at, each.kind) for each in result.missing] == [("length 200", "refused")]
    assert "length 200: not supported: length 200: the prompt has" in output.err
    assert [cell.length for cell in result.results] == [400, 900] and "|              900 |" in output.out
    assert (result.checkpoint.seq_length, result.protocol.cases, result.protocol.haystack.name) == (256, 2, "filler")
    for cell in result.results:
        assert cell.count == 2 == len(cell.cases) and 0 <= cell.low <= cell.accuracy <= cell.high <= 1
        assert sum(part.count for part in (cell.inside, cell.beyond) if part) == 2
        assert all(case.tokens <= cell.length for case in cell.cases)


@pytest.mark.parametrize("variant", ["plain", "NTK"])
def test_prompts_that_share_their_filler_get_the_same_answers(variant: str, checkpoint: Path, tmp_path: Path) -> None:
    given = ["--lengths", 1024, "--cases", 6, "--max-new-tokens", 8, *variants(variant)]
    found = []
    for name, tokens in (("batched", 16384), ("shared", 1)):
        assert evaluate("passkey", checkpoint, *given, "--tokens-per-batch", tokens, "--output", tmp_path / name) == 0
        file = tmp_path / name / f"passkey_{variant.lower()}.json"
        found.append(PasskeyResult.model_validate_json(file.read_bytes()).results[0].cases)
    assert found[0] == found[1] and len({case.answer for case in found[0]}) > 1


def test_a_longer_list_of_lengths_continues_a_file(checkpoint: Path, tmp_path: Path) -> None:
    path, whole = tmp_path / "needle.json", tmp_path / "whole.json"
    text = tmp_path / "book.txt"
    text.write_text("The boat lay near the shore. Nobody was on board! Was it late?\n\n" * 20)
    options = ["--depths", "0,50", "--haystack", text]
    assert evaluate("needle", checkpoint, "--lengths", "500", "--output", path, *options) == 0
    before = NeedleResult.model_validate_json(path.read_bytes())
    assert evaluate("needle", checkpoint, "--lengths", "400,500", "--output", path, *options) == 0
    assert evaluate("needle", checkpoint, "--lengths", "400,500", "--output", whole, *options) == 0
    after = NeedleResult.model_validate_json(path.read_bytes())
    assert path.read_bytes() == whole.read_bytes() and after.results[2:] == before.results
    assert [cell.key for cell in after.results] == [(400, 0), (400, 50), (500, 0), (500, 50)]


def test_positions_that_a_model_does_not_have_are_missing_and_no_crash(tmp_path: Path) -> None:
    learned = save_checkpoint(tmp_path / "learned", pos_emb="learned", max_position_embeddings=600)
    path = tmp_path / "ruler.json"
    options = ["--tasks", "multi_key", "--lengths", "512,700", "--output", path]
    assert evaluate("ruler", learned, *options) == 2
    result = RulerResult.model_validate_json(path.read_bytes())
    assert [cell.key for cell in result.results] == [("multi_key", 512)]
    assert [(each.at, each.kind) for each in result.missing] == [("multi_key, length 700", "refused")]
    assert "600 learned positions" in result.missing[0].reason


def test_a_fine_tuned_model_has_the_length_that_it_was_fine_tuned_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Position interpolation by 4 from 128 tokens; only the frequencies refer to those 128."""
    scaling = {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 128}
    run = save_checkpoint(tmp_path / "run", seq_length=512, rope_scaling=scaling, seed=99)
    assert evaluate("passkey", run, "--lengths", "500", "--output", tmp_path / "passkey.json") == 0
    assert "trained at 512, linear" in capsys.readouterr().out
    result = PasskeyResult.model_validate_json((tmp_path / "passkey.json").read_bytes())
    assert result.checkpoint.seq_length == 512 and result.checkpoint.seed == 99
    trained_with = result.checkpoint.trained_with["rope_scaling"]
    assert isinstance(trained_with, dict) and trained_with["original_max_position_embeddings"] == 128
    (cell,) = result.results
    assert cell.beyond is None and max(fact.distance for case in cell.cases for fact in case.facts) > 128


SAYS = {
    "current": "dynamic length current: in generation, a length-dependent extension uses the number of tokens so far",
    "prompt": "dynamic length prompt: in generation, a length-dependent extension uses the prompt's length",
    "total": "dynamic length total: in generation, a length-dependent extension uses the length of prompt and",
}


def test_the_length_that_a_dynamic_extension_sees_is_chosen_and_told(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts as long as the training length, to the token, so that a longer answer leaves it."""
    run = save_checkpoint(tmp_path / "run", seq_length=406)
    answers = {}
    for name, said in SAYS.items():
        folder = tmp_path / name
        options = ["--lengths", "406", "--max-new-tokens", "24", "--output", folder, *variants("plain", "NTK")]
        chosen = [] if name == "current" else ["--dynamic-length", name]
        assert evaluate("passkey", run, *options, *chosen) == 0
        output = capsys.readouterr().out
        assert said in output and "406*" in output and "0.00" in output
        results = [
            PasskeyResult.model_validate_json((folder / f"passkey_{each}.json").read_bytes())
            for each in ("plain", "ntk")
        ]
        assert {result.protocol.dynamic_length for result in results} == {name}
        answers[name] = [[case.answer for case in result.results[0].cases] for result in results]
    assert build_report([folder], tmp_path / "report", "passkey")
    assert said in (tmp_path / "report/report.md").read_text()
    plain = [each[0] for each in answers.values()]
    assert plain[0] == plain[1] == plain[2], "nothing else depends on it"
    assert answers["prompt"][1] == plain[0], "at the training length the extension is none"
    assert len({str(each[1]) for each in answers.values()}) == 3


def test_the_answers_are_the_same_with_every_way_of_decoding(checkpoint: Path, tmp_path: Path) -> None:
    """The result file names the way. Files without it were measured with the growing cache."""
    answers, options = [], ["--lengths", "400", *variants("plain", "NTK")]
    for name in ("growing", "static"):
        folder = tmp_path / name
        assert evaluate("passkey", checkpoint, *options, "--output", folder, "--decoding", name) == 0
        files = [folder / f"passkey_{each}.json" for each in ("plain", "ntk")]
        results = [PasskeyResult.model_validate_json(file.read_bytes()) for file in files]
        assert {result.protocol.decoding for result in results} == {name}
        answers.append([[case.answer for case in result.results[0].cases] for result in results])
    assert answers[0] == answers[1] and answers[0][0] != answers[0][1]
    told = json.loads((tmp_path / "growing/passkey_plain.json").read_text())
    del told["protocol"]["decoding"]
    assert PasskeyResult.model_validate(told).protocol.decoding == "growing"


def test_files_that_do_not_say_what_a_dynamic_extension_saw(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of before the choice: prompt and new tokens together."""
    path = tmp_path / "needle.json"
    options = ["--depths", "0", "--lengths", "500", "--output", path]
    assert evaluate("needle", checkpoint, *options, "--dynamic-length", "total") == 0
    told = json.loads(path.read_text())
    del told["protocol"]["dynamic_length"]
    path.write_text(json.dumps(told))
    assert NeedleResult.model_validate_json(path.read_bytes()).protocol.dynamic_length == "total"
    assert evaluate("needle", checkpoint, *options, "--dynamic-length", "total") == 0
    with pytest.raises(EvaluationError, match=r"contains another measurement \(different protocol.dynamic_length\)"):
        evaluate("needle", checkpoint, *options)
