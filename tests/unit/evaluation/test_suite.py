"""A suite's file: the commands that it stands for, and the errors before the first is run."""

import signal
import sys
from pathlib import Path

import pytest

from megatron_coca.commands.evaluate import parser
from megatron_coca.config import load_config
from megatron_coca.evaluation import EvaluationError
from megatron_coca.evaluation import suite as suites
from megatron_coca.evaluation.suite import (
    Command,
    SuiteFile,
    check_variants,
    describe_exit,
    option_arguments,
    plan_commands,
    read_suite,
    run_commands,
    training_lengths,
    with_checkpoints,
)
from megatron_coca.work.statuses import status_of
from tests.checkpoint_files import write_checkpoint

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "configs" / "evaluation").glob("*.yml"))

SUITE = """
title: Two models
checkpoints:
  RoFormer: runs/roformer
  CoCA:
    path: runs/coca
    set: [attention_backend=sdpa]
    variants:
      "": []
      "+ NTK": [configs/extend/dynamic_ntk.yml, rope_scaling.factor=2]
tasks:
  perplexity: {windows: ["1L,4L", 100], stride: 1L, data: [a.txt, b.txt], overwrite: true, max_length: null}
"""


def suite(tmp_path: Path, text: str = SUITE) -> SuiteFile:
    (tmp_path / "suite.yml").write_text(text)
    return read_suite(tmp_path / "suite.yml")


def commands(suite: SuiteFile, lengths: dict[str, int], tmp_path: Path) -> list[Command]:
    return plan_commands(suite, lengths, tmp_path / "results", "cpu", "bfloat16")


def test_a_call_for_each_checkpoint_with_all_its_variants(tmp_path: Path) -> None:
    planned = commands(suite(tmp_path), {"RoFormer": 64, "CoCA": 128}, tmp_path)
    assert [(each.task, each.checkpoint) for each in planned] == [("perplexity", "RoFormer"), ("perplexity", "CoCA")]
    args = parser().parse_args(planned[1].arguments)
    assert (args.checkpoint, args.label, args.device, args.dtype) == ("runs/coca", "CoCA", "cpu", "bfloat16")
    assert args.overrides == ["attention_backend=sdpa"]
    assert args.variant == [[""], ["+ NTK", "configs/extend/dynamic_ntk.yml", "rope_scaling.factor=2"]]
    assert (args.windows, args.stride, args.data) == ([128, 512, 100], 128, ["a.txt", "b.txt"])
    assert args.overwrite and args.max_length is None
    assert [file.name for file in planned[1].files] == ["perplexity_coca.json", "perplexity_coca_ntk.json"]
    assert args.output == tmp_path / "results"


def test_the_processes_of_a_suite_are_those_of_each_task_of_a_checkpoint(tmp_path: Path) -> None:
    (planned,) = plan_commands(suite(tmp_path), {"CoCA": 128}, tmp_path / "results", "cpu", "bfloat16", ["--jobs", "2"])
    assert parser().parse_args(planned.arguments).jobs == 2
    with pytest.raises(EvaluationError, match=r"tasks\.perplexity\.jobs: is set by the suite"):
        commands(suite(tmp_path, SUITE.replace("stride: 1L", "stride: 1L, jobs: 2")), {"CoCA": 128}, tmp_path)


def test_a_task_may_measure_some_variants(tmp_path: Path) -> None:
    only = suite(tmp_path, SUITE.replace("stride: 1L", 'stride: 1L, variants: ["+ NTK"]'))
    (command,) = commands(only, {"RoFormer": 64, "CoCA": 128}, tmp_path)
    assert [file.name for file in command.files] == ["perplexity_coca_ntk.json"], "RoFormer has no such variant"
    check_variants(only.tasks, (entry.variants for entry in only.checkpoints.values()))
    for wrong, message in (
        ("[NTK]", '"NTK": must be a list of variants; known: "", "\\+ NTK"'),
        ("NTK", "must be a list"),
    ):
        unknown = suite(tmp_path, SUITE.replace("stride: 1L", f"stride: 1L, variants: {wrong}"))
        with pytest.raises(EvaluationError, match=f"tasks.perplexity.variants: .*{message}"):
            check_variants(unknown.tasks, (entry.variants for entry in unknown.checkpoints.values()))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_suites_are_commands(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    read = read_suite(file)
    named = {"mine": "runs/mine"} if "any" in read.checkpoints else {}
    complete = with_checkpoints(read, named)
    planned = commands(complete, dict.fromkeys(complete.checkpoints, 512), tmp_path)
    assert {each.task for each in planned} == read.tasks.keys()
    files = [each for command in planned for each in command.files]
    assert len(set(files)) == len(files), "no result stands in the file of another"
    for each in planned:
        args = parser().parse_args(each.arguments)
        overlays = [change for variant in args.variant for change in variant[1:] if "=" not in change]
        assert all(Path(overlay).is_file() for overlay in overlays)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is not a suite"),
        ("title: [", r"suite\.yml:1: not valid YAML"),
        (SUITE.replace("title", "titel"), "titel: unknown key; .* suite are title, checkpoints"),
        (SUITE.replace("  CoCA:\n    path", "  CoCA:\n    paht"), "checkpoints.CoCA.paht"),
        (SUITE.replace("  perplexity", "  perplexty"), "tasks.perplexty: unknown task; known: analyse"),
        (SUITE + "  speed: {lengths: [64]}\n", "tasks.speed: unknown task"),
        (SUITE.replace("tasks:", "tasks: {}\nx:"), "not a suite: tasks: .* x: unknown key"),
        (SUITE.replace("stride: 1L", "output: x"), "tasks.perplexity.output: is set by the suite"),
        (SUITE.replace("stride: 1L", "help: true"), "tasks.perplexity.help: is set by the suite"),
        (SUITE.replace('"+ NTK"', '"!"'), "CoCA and CoCA: .* write perplexity_coca.json"),
        (SUITE.replace("stride", "strid"), "tasks.perplexity.strid: unknown option; known: .*stride"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        commands(suite(tmp_path, text), {"CoCA": 64}, tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "suite.yml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(EvaluationError, match="suite.yml: not UTF-8 text"):
        read_suite(tmp_path / "suite.yml")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"absent.yml: cannot be read"):
        read_suite(tmp_path / "absent.yml")


def test_checkpoints_are_named_on_the_command_line(tmp_path: Path) -> None:
    fixed = suite(tmp_path)
    assert with_checkpoints(fixed, {"CoCA": "elsewhere"}).checkpoints["CoCA"].path == "elsewhere"
    assert with_checkpoints(fixed, {"CoCA": "elsewhere"}).checkpoints["CoCA"].set == ["attention_backend=sdpa"]
    with pytest.raises(EvaluationError, match="--checkpoint Coca: unknown .*RoFormer, CoCA"):
        with_checkpoints(fixed, {"Coca": "elsewhere"})
    either = suite(tmp_path, SUITE.replace("  RoFormer: runs/roformer", "  any: {set: [a=1]}"))
    assert with_checkpoints(either, {"mine": "m"}).checkpoints["mine"].set == ["a=1"]
    with pytest.raises(EvaluationError, match="--checkpoint: no path for RoFormer"):
        with_checkpoints(suite(tmp_path, SUITE.replace("RoFormer: runs/roformer", "RoFormer: {}")), {})


def test_checkpoints_that_cannot_be_used_leave_the_others(tmp_path: Path) -> None:
    lengths, problems = training_lengths(suite(tmp_path))
    assert lengths == {} and problems.keys() == {"RoFormer", "CoCA"}
    assert "runs/roformer: no such checkpoint folder" in problems["RoFormer"]


def test_multiples_of_the_training_length_in_changes(tmp_path: Path) -> None:
    text = SUITE.replace("attention_backend=sdpa", "max_position_embeddings=4L")
    text = text.replace("rope_scaling.factor=2", "relative_positions.window=3L/4, a=1L/2L, b=L")
    args = parser().parse_args(commands(suite(tmp_path, text), {"CoCA": 128}, tmp_path)[0].arguments)
    assert args.overrides == ["max_position_embeddings=512"]
    assert args.variant[1][2:] == ["relative_positions.window=96", "a=1L/2L", "b=L"], "other values are unchanged"
    with pytest.raises(EvaluationError, match="3L/4: .* training length of 2;"):
        commands(suite(tmp_path, text), {"CoCA": 2}, tmp_path)


def test_a_task_may_be_run_in_several_ways(tmp_path: Path) -> None:
    text = SUITE + "  perplexity repeated: {windows: [100], stride: 1L, repeat: 1L}\n"
    planned = commands(suite(tmp_path, text), {"RoFormer": 64}, tmp_path)
    assert [each.task for each in planned] == ["perplexity", "perplexity repeated"]
    args = parser().parse_args(planned[1].arguments)
    assert (args.windows, args.repeat, args.output) == ([100], 64, tmp_path / "results" / "repeated")
    assert planned[1].files == (tmp_path / "results" / "repeated" / "perplexity_roformer.json",)
    with pytest.raises(EvaluationError, match="tasks.perplxity repeated: unknown task"):
        commands(suite(tmp_path, text.replace("perplexity r", "perplxity r")), {}, tmp_path)
    with pytest.raises(EvaluationError, match="both would write perplexity_roformer.json; rename"):
        again = text + "  perplexity Repeated: {windows: [100], stride: 1L}\n"
        commands(suite(tmp_path, again), {"RoFormer": 64}, tmp_path)


def test_how_a_command_ended() -> None:
    assert "SIGKILL (possibly because the host's memory" in describe_exit(128 + signal.SIGKILL)
    assert describe_exit(1) == "ended with status 1"


def test_a_killed_measurement_is_worth_a_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite with a killed child ends with status 1, and a scheduler starts it again."""
    program = "import os, sys; os.kill(os.getpid(), 9) if sys.argv[-1] == 'dies' else sys.exit(int(sys.argv[-1]))"
    monkeypatch.setattr(suites, "PROGRAM", (sys.executable, "-S", "-c", program))
    planned = [Command("perplexity", name, (name,), ()) for name in ("0", "2", "dies", "77")]
    failures = run_commands(planned)
    assert [failure.temporary for failure in failures] == [False, True, False]
    assert "perplexity of dies: killed by SIGKILL" in failures[1].reason and "see its messages" in failures[0].reason
    assert status_of(failures) == 1 and status_of([failures[0], failures[2]]) == 2


PI = {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 8}


def test_multiples_count_the_length_of_the_fine_tuning(tmp_path: Path) -> None:
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 32, "vocab_size": 256}
    write_checkpoint(tmp_path / "run", load_config([], shape | {"pos_emb": "rotary", "rope_scaling": PI}))
    text = "title: t\ncheckpoints: {PI: RUN}\ntasks: {passkey: {lengths: [2L]}}".replace("RUN", str(tmp_path / "run"))
    lengths, problems = training_lengths(suite(tmp_path, text))
    assert (lengths, problems) == ({"PI": 32}, {})
    (planned,) = commands(suite(tmp_path, text), lengths, tmp_path)
    assert parser().parse_args(planned.arguments).lengths == [64]


def test_an_option_that_is_true_by_default_can_be_false() -> None:
    given = {"apply_chat_template": True, "fewshot_as_multiturn": False, "log_samples": False, "tasks": ["a"]}
    found = option_arguments("lm-eval", given, 64)
    assert found == ["--apply-chat-template", "--fewshot-as-multiturn", "false", "--tasks", "a"]


def test_perplexity_has_default_windows_and_stride() -> None:
    args = suites.task_parser("perplexity").parse_args(["--checkpoint", "run"])
    assert (args.windows, args.stride) == (["1L", "2L", "4L"], "1L"), "multiples of the training length, as if given"
