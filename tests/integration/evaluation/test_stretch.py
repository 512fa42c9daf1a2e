"""`megatron-coca stretch` on a small model: results, page, budget, resumption, and the best method's use."""

import datetime
import io
import json
import re
import shutil
import signal
import subprocess
import time
from math import exp
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml

from megatron_coca.checkpoints import open_checkpoint
from megatron_coca.checkpoints.exporting import export
from megatron_coca.cli import main
from megatron_coca.commands import stretch as stretch_command
from megatron_coca.config import load_config
from megatron_coca.data.tokenizers.chat import ChatTemplate
from megatron_coca.evaluation.results import Store
from megatron_coca.evaluation.stretch import running
from megatron_coca.evaluation.stretch.choices import chosen_methods
from megatron_coca.evaluation.stretch.command import chat_of
from megatron_coca.evaluation.stretch.decision import decide
from megatron_coca.evaluation.stretch.plans import read_plan
from megatron_coca.evaluation.stretch.records import RESULTS, StretchResult, read_results, result_file
from megatron_coca.evaluation.tasks.margin.task import windows_at
from megatron_coca.model import build_model
from megatron_coca.work.processes import PROGRAM
from tests.checkpoint_files import write_checkpoint
from tests.unit.evaluation.stretch_cases import entries_of

ROOT = Path(__file__).parents[3]
SHAPE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 512, "vocab_size": 512}
SHAPE |= {"no_weight_tying": True, "pos_emb": "rotary", "tokenizer_type": "CharLevelTokenizer"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = load_config([], SHAPE)
    weights = {name: 3 * weight for name, weight in build_model(config).state_dict().items()}
    return write_checkpoint(tmp_path_factory.mktemp("run"), config, weights)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text(json.dumps({"text": "It is a truth universally acknowledged. " * 120}) + "\n")
    return path


METHODS = ("yarn", "rerope", "dynamic:3")


def stretch(model: Path, text: Path, output: Path, *more: object) -> int:
    given = ["stretch", model, "--data", text, "--to", "2x", "--output", output, "--methods", ",".join(METHODS)]
    return main([str(each) for each in [*given, "--dtype", "float32", "--device", "cpu", *more]])


def result_of(output: Path, *methods: str) -> StretchResult:
    return read_results(output, methods)


def files(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (output / RESULTS).iterdir() if not path.name.startswith(".")}


def test_a_page_of_results_and_the_best_method_in_use(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "MOST_FACTS", 4)
    assert stretch(model, text, tmp_path / "out") == 0
    result, page = result_of(tmp_path / "out", *METHODS), (tmp_path / "out/stretch.md").read_text()
    entries = entries_of(result)
    assert entries.keys() == {(name, length) for name in ("plain", *METHODS) for length in (512, 1024)}
    tasks = [[case.task for case in entry.cases] for entry in entries.values()]
    assert all(each == ["passkey", "needle", "passkey", "needle"][: len(each)] for each in tasks) and all(tasks)
    assert all(case.tokens <= entry.length for entry in entries.values() for case in entry.cases)
    plain, dynamic = (entries[name, 512].nlls for name in ("plain", "dynamic:3"))
    assert dynamic and plain[: len(dynamic)] == dynamic, "no extension at 1x"
    best = decide(result).chosen
    load_config([tmp_path / "out/best.yml"], SHAPE)  # also if it changes nothing
    changes = yaml.safe_load((tmp_path / "out/best.yml").read_text())
    assert changes.keys() == result.results[best].overrides.keys()
    lines = page.splitlines()
    assert lines[0].startswith("# ") and [line for line in lines if line.startswith(("![", "| method"))]
    assert (tmp_path / "out/stretch.svg").read_bytes().startswith(b"<?xml")
    html = (tmp_path / "out/stretch.html").read_text()
    assert lines[0].removeprefix("# ") in html and html.count("<picture>") == 1 and html.index("<table>") > 0
    assert "dynamic:3" in html and "# " + best + ", chosen by" in html and "`" not in page.replace("```", "")
    before = files(tmp_path / "out")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n"))
    assert stretch(model, text, tmp_path / "out", "--export", tmp_path / "exported", "--chat") == 0
    assert files(tmp_path / "out") == before, "nothing is measured again"
    assert (tmp_path / "exported/config.json").is_file()
    printed = capsys.readouterr().out
    assert "compared with" in printed and f"\n{best} is used: " in printed


def test_a_short_budget_leaves_out_and_the_same_command_continues(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An hour for each window of 1,024 tokens; one window and one fact of 512 tokens fit into the budget each time."""
    monkeypatch.setattr(running, "MOST_FACTS", 2)
    monkeypatch.setattr(running.Pace, "learn", lambda *args: None)
    monkeypatch.setattr(running, "_seconds", lambda model, tokens: 3600.0 * tokens / 1024)
    assert stretch(model, text, tmp_path / "out", "--budget", "75m") == 0
    entries, errors = entries_of(result_of(tmp_path / "out", *METHODS)), capsys.readouterr().err
    assert {(length, len(each.nlls), len(each.cases)) for (_, length), each in entries.items()} == {(512, 1, 1)}
    assert len(entries) == 4
    assert "--budget: 1:15:00 is too short" in errors
    assert re.search("left out: .*one fact at 1024 tokens of plain", errors)
    page = (tmp_path / "out/stretch.md").read_text()
    assert page.startswith("# Nothing beyond the training length of 512 tokens")
    assert "The budget of 1:15:00 was too short" in page and "Not measured: all methods at 1,024 tokens" in page
    monkeypatch.undo()
    monkeypatch.setattr(running, "MOST_FACTS", 2)
    assert stretch(model, text, tmp_path / "out") == 0
    after, page = entries_of(result_of(tmp_path / "out", *METHODS)), (tmp_path / "out/stretch.md").read_text()
    assert "Left out" not in page and "was too short" not in page
    assert len(after) == 8 and all(entry.nlls and entry.cases for entry in after.values())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--methods", "yarm"], "--methods yarm: unknown method"),
        (["--methods", "rerope:3"], "--methods rerope:3: rerope has no factor"),
        (["--to", "16x"], "has fewer than 8193 tokens"),
        (["--documents", "9"], "has text for only 4 documents of 1025 tokens, not 9"),
    ],
)
def test_mistakes(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert stretch(model, text, tmp_path / "out", *more) == 2
    assert message in capsys.readouterr().err


def test_results_of_an_earlier_version_are_not_resumed(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "MOST_FACTS", 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/results.json").write_text("{}")
    assert stretch(model, text, tmp_path / "out", "--methods", "plain") == 2
    assert "results.json: was written by an earlier version" in capsys.readouterr().err
    assert not (tmp_path / "out/results").exists()
    assert stretch(model, text, tmp_path / "out", "--methods", "yarm", "--overwrite") == 2
    assert (tmp_path / "out/results.json").exists(), "a mistake removes nothing"
    assert stretch(model, text, tmp_path / "out", "--methods", "rerope", "--to", "1x", "--overwrite") == 0
    assert not (tmp_path / "out/results.json").exists() and (tmp_path / "out/stretch.md").exists()


def test_results_of_other_settings_are_not_resumed(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are those of the task `margin`, so a report shows them."""
    monkeypatch.setattr(running, "MOST_FACTS", 2)
    assert stretch(model, text, tmp_path / "out", "--methods", "rerope") == 0
    for more, differing in ((["--to", "1x"], "documents.max_length"), (["--documents", "1"], "documents.count")):
        assert stretch(model, text, tmp_path / "out", "--methods", "rerope", *more) == 2
        assert f"different {differing}" in capsys.readouterr().err
    assert main(["evaluate", "report", str(tmp_path / "out/results"), "--output", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report/report.md").read_text()
    margin = result_of(tmp_path / "out").margin("plain", 512)
    assert "Margins of hidden facts" in page and "| rerope" in page and f"{margin:.1f}" in page


def test_a_killed_run_keeps_the_date_of_its_prompts(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate("{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}", {})
    tokenizer: Any = SimpleNamespace(chat=template, turn_ends=lambda: ([], []))
    chat = chat_of(tokenizer, "2026-01-07")
    assert chat is not None and chat.date == tokenizer.chat.now == "2026-01-07" and not caplog.text
    tokenizer.chat = template
    today = chat_of(tokenizer)
    assert today is not None and today.date == datetime.date.today().isoformat()


def test_a_chat_template_that_changes_the_text_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def render(messages: list[dict[str, str]], prompt: bool) -> str:
        return f"<user>{messages[-1]['content'].lower()}"

    assert chat_of(cast(Any, SimpleNamespace(chat=SimpleNamespace(render=render), usual_start=5))) is None
    assert "facts are hidden in plain text" in caplog.text


def test_options_are_checked_before_the_measurement(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stretch(model, text, tmp_path / "out", "--finetune", 2) == 2
    assert "--finetune: needs a Hugging Face folder or a GGUF file" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert stretch(model, text, tmp_path / "out", "--export", tmp_path / "file/exported") == 2
    assert "exported: cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


PLAN = """
title: A plan
methods: [plain, yarn, rerope]
to: 2
documents: 2
cases: {1: 2, 2: 6}
contrasts:
  - {method: rerope, other: yarn, at: 2, expected: 1.0, deviation: 1.2}
  - {method: rerope, other: plain, at: 2, quantity: loss}
"""


def test_the_contrasts_of_a_plan(model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.yml").write_text(PLAN)
    given = ["stretch", model, "--data", text, "--plan", tmp_path / "plan.yml", "--output", tmp_path / "out"]
    assert main([*map(str, given), "--dtype", "float32", "--device", "cpu"]) == 0
    result, page = result_of(tmp_path / "out", "yarn", "rerope"), (tmp_path / "out/stretch.md").read_text()
    assert {key[1]: len(entry.cases) for key, entry in entries_of(result).items()} == {512: 2, 1024: 6}
    pairs = zip(*(result.facts(name, 1024) for name in ("rerope", "yarn")), strict=True)
    mean = sum(case.margin - another.margin for case, another in pairs) / 6
    assert "| rerope - yarn, 2x" in page and f"{mean:+.3f}" in page and " 0.38 |" in page
    (tmp_path / "plan.yml").write_text(PLAN.replace("other: yarn", "other: pi"))
    assert main([str(each) for each in given]) == 2
    assert "contrasts[0]: pi is not one of the methods" in capsys.readouterr().err
    shipped = read_plan(ROOT / "studies/real_model/plan.yml")
    assert len(chosen_methods(shipped.methods, shipped.to, 8192)) == 9 and shipped.cases == {1: 24, 2: 24, 4: 8}


def measured(output: Path, *methods: str) -> dict[str, list[float]]:
    """The numbers of a result, without times. Margins are rounded, because they depend on the prompt before."""
    entries = entries_of(result_of(output, *methods))
    found = {f"loss {key}": entry.nlls for key, entry in entries.items()}
    return found | {f"facts {key}": [round(case.margin, 3) for case in entry.cases] for key, entry in entries.items()}


@pytest.mark.always
def test_an_interrupted_run_continues_with_the_next_input(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped after its first and its seventh input measures nothing twice."""
    (tmp_path / "plan.yml").write_text("{title: Two, methods: [plain, rerope], to: 1, documents: 2, cases: {1: 4}}")
    given = [model, "--data", text, "--plan", tmp_path / "plan.yml", "--dtype", "float32", "--output"]
    stretched = [stretch_command.main([str(each) for each in [*given, tmp_path / "whole"]])]
    written = 0

    def stop(self: Store[Any], *given: Any) -> None:
        nonlocal written
        put(self, *given)
        written += 1
        if written in stops:
            stops.remove(written)
            raise KeyboardInterrupt

    put, stops = Store.put, {1, 7}
    monkeypatch.setattr(Store, "put", stop)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            stretch_command.main([str(each) for each in [*given, tmp_path / "out"]])
        assert sum(map(len, measured(tmp_path / "out", "rerope").values())) == written == max({1, 7} - stops)
        assert not (tmp_path / "out/stretch.md").exists()
    shutil.copytree(tmp_path / "out", tmp_path / "fewer", dirs_exist_ok=True)
    stretched.append(stretch_command.main([str(each) for each in [*given, tmp_path / "out"]]))
    assert stretched == [0, 0] and written == 2 * (2 + 4), "every input is measured once"
    assert measured(tmp_path / "out", "rerope") == measured(tmp_path / "whole", "rerope")
    (tmp_path / "plan.yml").write_text("{title: Two, methods: [plain], to: 1, documents: 2, cases: {1: 2}}")
    assert stretch_command.main([str(each) for each in [*given, tmp_path / "fewer"]]) == 0
    fewer, whole = (
        [case.margin for case in result_of(tmp_path / name).facts("plain", 512)] for name in ("fewer", "whole")
    )
    assert fewer[:2] == pytest.approx(whole[:2], abs=1e-3)


@pytest.mark.slow
def test_a_killed_process_is_resumed(model: Path, text: Path, tmp_path: Path) -> None:
    plan, begun_file = tmp_path / "plan.yml", result_file(tmp_path / "out", "plain")
    plan.write_text("{title: T, methods: [plain, rerope], to: 2, documents: 4, cases: {1: 8, 2: 16}, seed: 3}")
    given = [*PROGRAM, "stretch", model, "--data", text, "--plan", plan, "--dtype", "float32", "--device", "cpu"]
    command = [*map(str, given), "--output", str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=ROOT)
    while not (begun_file.exists() and entries_of(result_of(tmp_path / "out"))):
        assert process.poll() is None, "it must not end before it is killed"
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    begun = result_of(tmp_path / "out")
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    done = result_of(tmp_path / "out", "rerope")
    assert done.header.protocol.seed == 3 and len(entries_of(done)) == 4
    assert all(len(entry.nlls) == 4 for entry in entries_of(done).values())
    assert "Left out" not in (tmp_path / "out/stretch.md").read_text()
    assert {len(done.facts(name, 512)) for name in ("plain", "rerope")} == {8}
    assert {len(done.facts(name, 1024)) for name in ("plain", "rerope")} == {16}
    for key, entry in entries_of(begun).items():
        assert entries_of(done)[key].nlls[: len(entry.nlls)] == entry.nlls
        costs = [result.costs[key[0]].get(windows_at(key[1])) for result in (begun, done)]
        assert costs[1] is not None, "the process may have ended before it wrote the first one"
        assert costs[0] is None or costs[1].seconds >= costs[0].seconds


@pytest.mark.slow
def test_trials_of_fine_tuning(model: Path, text: Path, tmp_path: Path) -> None:
    """Each method beside the control on the same tokens, and beside itself without training."""
    export(model, tmp_path / "folder")
    more = ["--methods", "plain", "--finetune", 3, "--finetune-method", "pi,coca_stages", "--finetune-length", 256]
    more += ["--finetune-set", "optimizer.params.lr=0.01", "--export", tmp_path / "exported"]
    out = tmp_path / "out"
    assert stretch(tmp_path / "folder", text, out, *more) == 0
    before, names = result_of(out, "pi"), ("none", "pi", "coca_stages")
    trained = {name: open_checkpoint(out / f"finetuned_{name}") for name in names}
    assert {each.step for each in trained.values()} == {3}
    assert {each.trained.model.seq_length for each in trained.values()} == {256}
    assert trained["pi"].trained.position.rope_scaling.original_max_position_embeddings == 512
    assert trained["coca_stages"].trained.position.pos_emb == "coca"
    after = {name: result_of(out / f"after_{name}") for name in names}
    for each in after.values():
        assert each.lengths() == [256, 512, 1024] and each.header.protocol.scored == before.header.protocol.scored
        assert each.losses("plain", 1024) != before.losses("plain", 1024) != []
        hidden = [[(case.task, case.tokens) for case in one.facts("plain", 512)[:4]] for one in (each, before)]
        assert len(hidden[0]) == 4 and hidden[0] == hidden[1]
    page = " ".join((out / "trained/stretch.md").read_text().split())
    ratio = exp(
        mean(a - b for a, b in zip(*(after[name].losses("plain", 1024) for name in ("pi", "none")), strict=True))
    )
    assert f"| pi (trained) | none (trained) | 1,024 | {ratio:.3f} " in page
    assert "| pi (trained) | pi | 1,024 |" in page and "| none (trained) | plain | 512 |" in page
    assert "| none (trained) | 3 | 768 |" in page, "three steps of one sample"
    chosen = (out / "trained/best.yml").read_text().removeprefix("# ").partition(", chosen by")[0]
    length = open_checkpoint(tmp_path / "exported").trained.model.seq_length
    assert length == (256 if chosen.endswith("(trained)") else 512)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_trials_of_a_mixture_of_experts(lora: bool, text: Path, tmp_path: Path) -> None:
    """Attention changes, and routers keep their weights."""
    keys = {"moe_num_experts": 4, "moe_top_k": 2, "norm": "rmsnorm", "activation": "swiglu", "use_bias_in_mlp": False}
    keys |= {"use_bias_in_attn_linear": False, "gpt_j_residual": False}
    config = load_config([], SHAPE | keys)
    export(write_checkpoint(tmp_path / "run", config), tmp_path / "folder")
    more = ["--methods", "plain", "--budget", "3s", "--finetune", 3, "--finetune-method", "pope,coca_stages"]
    more += ["--finetune-length", 128, *(["--lora"] if lora else []), "--export", tmp_path / "exported"]
    assert stretch(tmp_path / "folder", text, tmp_path / "out", *more) == 0
    before = dict(open_checkpoint(tmp_path / "folder").weights())
    for method, names in (("none", ("query",)), ("pope", ("query", "position")), ("coca_stages", ("key",))):
        after = dict(open_checkpoint(tmp_path / f"out/finetuned_{method}").weights())
        changed = {name for name in after if name not in before or not torch.equal(after[name], before[name])}
        assert not [name for name in changed if "router" in name]
        assert all(any(part in name for name in changed) for part in names)


@pytest.mark.slow
def test_a_plan_declares_the_fine_tuning_and_contrasts_of_trained_models(
    model: Path, text: Path, tmp_path: Path
) -> None:
    export(model, tmp_path / "folder")
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().upper())
    (tmp_path / "plan.yml").write_text(
        "{title: T, methods: [plain], to: 2, documents: 2, seed: 3, dtype: float32, cases: {1: 2, 2: 2},\n"
        "finetune: {steps: 3, methods: [drope, pi], length: 256, lora: true, set: [optimizer.params.lr=0.01]},\n"
        "contrasts: [{method: drope (trained), other: none (trained), at: 1, quantity: loss}, "
        "{method: pi (trained), other: pi, at: 2, quantity: loss}]}"
    )
    out = tmp_path / "out"
    assert stretch(tmp_path / "folder", text, out, "--plan", tmp_path / "plan.yml", "--finetune-data", other) == 0
    names = {name: out / f"finetuned_{name}" for name in ("none", "drope", "pi")}
    configs = {name: open_checkpoint(folder).trained for name, folder in names.items()}
    assert {config.model.seq_length for config in configs.values()} == {256}
    assert {config.optimizer.lora and config.optimizer.lora.rank for config in configs.values()} == {16}
    trials = {name: json.loads(folder.with_suffix(".json").read_text()) for name, folder in names.items()}
    assert len({trial["data"] for trial in trials.values()}) == 1
    page = (out / "trained/stretch.md").read_text()
    before, after = result_of(out, "pi"), {name: result_of(out / f"after_{name}") for name in names}
    first, second = (
        mean(a - b for a, b in zip(one.losses(ours, length), other.losses(theirs, length), strict=True))
        for one, ours, other, theirs, length in (
            (after["drope"], "plain", after["none"], "plain", 512),
            (after["pi"], "plain", before, "pi", 1024),
        )
    )
    rows = {line.split(" | ")[0].strip(): line for line in page.splitlines() if line.startswith("| ")}
    assert f"{first:+.3f}" in rows["| drope (trained) - none (trained), 1x"]
    assert f"{second:+.3f}" in rows["| pi (trained) - pi, 2x"]
    assert "Contrasts" not in (out / "stretch.md").read_text(), "they belong to the page of all models"


def test_an_unknown_method_of_fine_tuning(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stretch(model, text, tmp_path / "out", "--finetune", 2, "--finetune-method", "dropp") == 2
    assert "--finetune-method dropp: unknown method" in capsys.readouterr().err
    (tmp_path / "plan.yml").write_text("{title: T, methods: [], to: 1, finetune: {steps: 2, methods: [dropp]}}")
    assert stretch(model, text, tmp_path / "out", "--plan", tmp_path / "plan.yml") == 2
    assert "plan.yml: finetune.methods: dropp: unknown method" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trial_is_continued_only_by_the_same_model_with_more_steps(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(model, tmp_path / "folder")
    config = load_config([], SHAPE)
    weights = {name: 2 * weight for name, weight in build_model(config).state_dict().items()}
    (tmp_path / "second").mkdir()
    export(write_checkpoint(tmp_path / "second", config, weights), tmp_path / "other")

    def step(name: str, steps: int, *more: object) -> int | None:
        given = ["--methods", "plain", "--finetune", steps, *more]
        if stretch(tmp_path / name, text, tmp_path / "out", *given) != 0:
            return None
        return result_of(tmp_path / "out/after_pi").header.checkpoint.step

    assert step("folder", 1) == 1 and step("folder", 2) == 2
    capsys.readouterr()
    assert step("folder", 1) is None and "has more than 1 steps; name another" in capsys.readouterr().err
    shutil.move(tmp_path / "out/results", tmp_path / "kept")
    assert step("other", 3) is None and "a trial of another model" in capsys.readouterr().err
    (tmp_path / "plan.yml").write_text("{title: T, methods: [yarn], to: 1, cases: {1: 3}, seed: 5}")
    assert step("other", 1, "--overwrite", "--plan", tmp_path / "plan.yml") == 1
    after = result_of(tmp_path / "out/after_pi")
    assert after.header.documents.max_length == 512 + 1 and after.header.protocol.seed == 5, "as the plan says"
    assert [len(entry.cases) for entry in entries_of(after).values()] == [3]
