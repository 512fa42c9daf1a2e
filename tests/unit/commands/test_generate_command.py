"""The command `generate`, from options to text on the terminal and in files."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_coca import cli
from megatron_coca.commands import generate
from megatron_coca.config import ConfigError, load_config
from megatron_coca.data import DataError
from megatron_coca.evaluation import EvaluationError
from megatron_coca.model import Sampling
from megatron_coca.model.static_decoding import StaticDecoder
from megatron_coca.text_generation import Continuation, TextGenerator, load_generator
from tests.checkpoint_files import TINY, beginning_tokenizer, talkative_model, write_checkpoint
from tests.terminal import Terminal, type_lines

ROOT = Path(__file__).parents[3]
KEYS = TINY | {"max_position_embeddings": 40}
LONG = "the sea was calm and a small boat"
TEN = ["--max-new-tokens", "10"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint") / "run"
    config = load_config([], KEYS)
    write_checkpoint(folder, config, talkative_model(config).state_dict())
    return str(folder)


def expected(
    checkpoint: str, prompt: str, sampling: Sampling | None = None, start_token: str | None = None, **options: Any
) -> str:
    generator = load_generator(checkpoint, start_token=start_token)
    return generator.complete([prompt], 10, sampling or Sampling(), **options)[0].text


def test_one_prompt_is_answered_by_its_text(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--temperature", "0.8", "--top-k", "40", "--top-p", "0.9", "--repetition-penalty", "1.1", "--seed", "5"]
    assert generate.main(["--checkpoint", checkpoint, "--prompt", LONG, *TEN, *options]) == 0
    wanted = expected(checkpoint, LONG, Sampling(0.8, 40, 0.9, 1.1, 5))
    assert capsys.readouterr().out == wanted + "\n"


def test_prompts_of_a_file_into_a_file(checkpoint: str, tmp_path: Path) -> None:
    file, output = tmp_path / "prompts.jsonl", tmp_path / "new" / "out.jsonl"
    file.write_text('{"prompt": "the sea"}\n\n{"text": "a small\\nboat"}\n')
    options = ["--file", str(file), "--num-samples", "2", "--temperature", "1", "--output", str(output), *TEN]
    assert generate.main(["--checkpoint", checkpoint, *options]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["prompt"] for record in records] == ["the sea"] * 2 + ["a small\nboat"] * 2
    assert records[0]["text"] == expected(checkpoint, "the sea", Sampling(1.0)) != records[1]["text"]
    assert all(record["tokens"] <= 10 and record["finish"] in ("eod", "length") for record in records)


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A counter of the tokens left until Ctrl-C; tests set it."""
    left, push = [10**9], Continuation.push

    def counted(row: Continuation, token: int) -> None:
        push(row, token)
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Continuation, "push", counted)
    return left


def test_what_is_complete_is_written_and_resumed(
    checkpoint: str, tmp_path: Path, stopping: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """After Ctrl-C and a torn line, the file is that of one uninterrupted command."""
    prompts, output, whole = tmp_path / "prompts.txt", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    prompts.write_text("the sea was calm\na\nthe sea\na\n")
    given = ["--checkpoint", checkpoint, "--file", str(prompts), "--num-samples", "2", "--temperature", "1", *TEN]
    given += ["--tokens-per-batch", "1"]
    assert generate.main([*given, "--output", str(whole)]) == 0
    for tokens in (25, 17):  # two, then one more of the eight continuations of up to ten tokens
        stopping[0] = tokens
        with pytest.raises(KeyboardInterrupt):
            generate.main([*given, "--output", str(output)])
        lines = output.read_text().splitlines()
        assert 0 < len(lines) < 8 and all(line in whole.read_text().splitlines() for line in lines)
        assert f"{len(lines)} of 8 continuations are complete; the same command adds" in capsys.readouterr().err
        with output.open("a") as file:
            file.write('{"prompt": "the s')
    stopping[0] = before = 10**9
    assert generate.main([*given, "--output", str(output)]) == 0
    assert output.read_text() == whole.read_text() and before - stopping[0] < 70
    assert generate.main([*given, "--output", str(output)]) == 0  # nothing is left
    assert output.read_text() == whole.read_text() and before - stopping[0] < 70


def test_what_is_complete_is_printed_in_order(
    checkpoint: str, tmp_path: Path, stopping: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("the sea was calm\na\nthe sea\n")
    stopping[0] = 25
    given = ["--checkpoint", checkpoint, "--file", str(tmp_path / "prompts.txt"), *TEN]
    with pytest.raises(KeyboardInterrupt):
        generate.main(given)
    shown = capsys.readouterr().out
    assert shown == "".join(
        f"[{n}/3] {text}\n{expected(checkpoint, text)}\n\n" for n, text in ((2, "a"), (3, "the sea"))
    )


def test_another_output_is_not_replaced(checkpoint: str, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    given = ["--checkpoint", checkpoint, "--prompt", "a", *TEN, "--output", str(output)]
    assert generate.main(given) == 0
    for changed in (["--seed", "1"], ["--stop", "x"], ["rope_scaling.rope_type=linear", "rope_scaling.factor=2"]):
        with pytest.raises(EvaluationError, match="with another checkpoint or other options; .*--output"):
            generate.main([*given, *changed])
    with pytest.raises(EvaluationError, match="contains continuations of 1 other prompts"):
        generate.main([*given[:2], "--prompt", "b", *given[4:]])
    before = output.read_text()
    assert generate.main([*given, "--prompt", "b"]) == 0  # adds a prompt
    assert output.read_text().startswith(before) and output.read_text().count("\n") == 2
    assert generate.main([*given[:2], "--prompt", "b", *given[4:], "--overwrite"]) == 0
    assert json.loads(output.read_text())["prompt"] == "b"
    output.write_text("mine\n")
    with pytest.raises(EvaluationError, match="is not an output of this command"):
        generate.main(given)
    assert output.read_text() == "mine\n"


def test_lines_of_a_file_below_their_headings(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("the sea\n\na boat\n")
    assert generate.main(["--checkpoint", checkpoint, "--file", str(tmp_path / "prompts.txt"), *TEN]) == 0
    shown = capsys.readouterr().out
    assert shown == "".join(
        f"[{number}/2] {prompt}\n{expected(checkpoint, prompt)}\n\n"
        for number, prompt in enumerate(("the sea", "a boat"), start=1)
    )


def test_standard_input_is_one_prompt(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the sea\nwas calm\n"))
    assert generate.main(["--checkpoint", checkpoint, *TEN]) == 0
    assert capsys.readouterr().out == expected(checkpoint, "the sea\nwas calm") + "\n"


def test_typed_prompts_are_continued_one_by_one(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    type_lines(monkeypatch, "the sea", "", "the sea")
    assert generate.main(["--checkpoint", checkpoint, "--temperature", "1", "--seed", "3", *TEN]) == 0
    first, again = (expected(checkpoint, "the sea", Sampling(1.0, seed=seed)) for seed in (3, 4))
    assert isinstance(sys.stdout, Terminal) and first != again
    assert sys.stdout.getvalue() == f"{first}\n{again}\n\n"


@pytest.mark.parametrize("typed", [False, True], ids=["prompt", "typed"])
@pytest.mark.parametrize("decoding", ["static", "auto"])
def test_the_text_is_the_same_with_every_way_of_decoding(
    typed: bool,
    decoding: str,
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a CPU, `auto` decodes with a growing cache."""
    made, build = [], StaticDecoder.__init__

    def counted(decoder: StaticDecoder, *arguments: Any) -> None:
        made.append(decoder)
        build(decoder, *arguments)

    monkeypatch.setattr(StaticDecoder, "__init__", counted)
    given = ["--checkpoint", checkpoint, "--temperature", "1", "--seed", "3", *TEN, "--decoding", decoding]
    wanted = expected(checkpoint, LONG, Sampling(1.0, seed=3))
    if typed:
        type_lines(monkeypatch, LONG)
        assert generate.main(given) == 0
        assert isinstance(sys.stdout, Terminal) and sys.stdout.getvalue() == f"{wanted}\n\n"
    else:
        assert generate.main([*given, "--prompt", LONG]) == 0
        assert capsys.readouterr().out == wanted + "\n"
    assert len(made) == (decoding == "static")


def test_static_decoding_of_a_model_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typed prompts go on, because another text may be supported."""
    folder = tmp_path / "xpos"
    config = load_config([], KEYS | {"pos_emb": "xpos"})
    write_checkpoint(folder, config, talkative_model(config).state_dict())
    given = ["--checkpoint", str(folder), *TEN]
    assert cli.main(["generate", *given, "--prompt", LONG, "--decoding", "static"]) == 2
    error = "not support this model or text (global layers: "
    assert error in capsys.readouterr().err
    assert generate.main([*given, "--prompt", LONG, "--decoding", "auto"]) == 0
    assert capsys.readouterr().out == expected(str(folder), LONG) + "\n"
    type_lines(monkeypatch, LONG, LONG)
    assert generate.main([*given, "--decoding", "static"]) == 0
    assert capsys.readouterr().err.count(error) == 2


def test_ctrl_c_stops_only_a_continuation(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    type_lines(monkeypatch, "the sea", KeyboardInterrupt)
    pushed, push = [], Continuation.push

    def interrupted(row: Continuation, token: int) -> None:
        push(row, token)
        pushed.append(token)
        if len(pushed) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Continuation, "push", interrupted)
    with pytest.raises(KeyboardInterrupt):  # the second one, at the prompt
        generate.main(["--checkpoint", checkpoint, *TEN])
    assert isinstance(sys.stdout, Terminal) and sys.stdout.getvalue().endswith(" [stopped]\n") and len(pushed) == 4


def test_a_typed_prompt_has_one_continuation(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    type_lines(monkeypatch)
    with pytest.raises(EvaluationError, match="--num-samples: .*typed prompts; .*with --prompt"):
        generate.main(["--checkpoint", checkpoint, "--num-samples", "2"])


@pytest.mark.parametrize(
    ("keys", "options", "found"),
    [
        ({"text-gen-type": "interactive", "num-samples": 10, "sample-output-file": "o"}, [], ["the sea"]),
        ({"text-gen-type": "unconditional", "num-samples": 2}, [], ["", ""]),
        ({"text-gen-type": "input-file", "sample-input-file": "prompts.txt"}, [], ["a", "b"]),
        ({"text-gen-type": "unconditional"}, ["--prompt", "c"], ["c"]),
        ({"text-gen-type": "precompute"}, [], "text_gen_type: `precompute` is not supported"),
        ({"maximum_tokens": 0}, [], "maximum_tokens: not a valid value"),
    ],
)
def test_generation_keys_of_gpt_neox(
    checkpoint: str,
    keys: dict[str, Any],
    options: list[str],
    found: list[str] | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("a\nb\n")
    Path("neox.yml").write_text(json.dumps({"maximum_tokens": 3, "top_p": 0.0, "recompute": False} | keys))
    type_lines(monkeypatch, "the sea")
    asked: list[str] = []
    complete = TextGenerator.complete

    def noting(self: TextGenerator, prompts: list[str], *args: Any, **options: Any) -> list[Continuation]:
        asked.extend(prompts)
        rows = complete(self, prompts, *args, **options)
        assert [len(row.tokens) for row in rows] == [3] * len(prompts)
        return rows

    monkeypatch.setattr(TextGenerator, "complete", noting)
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=found):
            generate.main(["--checkpoint", checkpoint, "neox.yml"])
    else:
        assert generate.main(["--checkpoint", checkpoint, "neox.yml", *options]) == 0
        assert asked == found and not Path("o").exists()


def test_extensions_as_files_and_keys(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overlay = str(ROOT / "configs" / "extend" / "dynamic_ntk.yml")
    shown = []
    for changes in ([], [overlay], [overlay, "rope_scaling.factor=8.0"]):
        arguments = [
            "--checkpoint",
            checkpoint,
            *changes,
            "--prompt",
            LONG * 3,
            "--output",
            str(tmp_path / "out.jsonl"),
            "--overwrite",
        ]
        assert generate.main([*arguments, "--max-new-tokens", "40"]) == 0
        shown.append((tmp_path / "out.jsonl").read_text())
    assert len(set(shown)) == 3
    assert cli.main(["generate", "--checkpoint", checkpoint, "--prompt", "x", "num_layers=3"]) == 2
    assert "cannot be evaluated with another num_layers" in capsys.readouterr().err


def test_a_stop_string(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = expected(checkpoint, LONG, Sampling(1.0))
    arguments = ["--checkpoint", checkpoint, "--prompt", LONG, "--temperature", "1", *TEN]
    assert generate.main([*arguments, "--stop", text[4:6]]) == 0
    assert capsys.readouterr().out == text[: text.index(text[4:6])] + "\n"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(r"\n\nUser:", "\n\nUser:"), (r"a\tb", "a\tb"), (r"\\n", r"\n"), (r"\end{a}", r"\end{a}"), ("\n", "\n")],
)
def test_escapes_in_a_stop_string(typed: str, meant: str) -> None:
    assert generate.parser().parse_args(["--checkpoint", "x", "--stop", typed]).stop == [meant]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x", "--top-p", "0"], "top_p: 0.0 is out of range"),
        (["--prompt", "x", "--stop", ""], "--stop: an empty text"),
        (["--prompt", "x", "rope_scalin.factor=2"], "did you mean `rope_scaling"),
        (["--prompt", "x", "none.yml"], "none.yml"),
        (["--file", "none.txt"], "none.txt: cannot be read"),
        (["--file", "bad.jsonl"], r"bad.jsonl:2: no prompt text; write an object"),
        (["--file", "empty.txt"], "empty.txt: no prompt"),
        (["--prompt", "x", "--device", "cuda:99"], "device cuda:99: cannot be used here"),
        (["--prompt", "x", "--output", "."], "is a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_user_can_correct(
    checkpoint: str,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"prompt": "x"}\n["x"]\n')
    Path("empty.txt").write_text("\n")
    assert cli.main(["generate", "--checkpoint", checkpoint, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megatron-coca generate: ") and message in error


def test_no_checkpoint_and_too_many_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--checkpoint", str(tmp_path / "none"), "--prompt", "x"]) == 2
    write_checkpoint(tmp_path / "learned", load_config([], KEYS | {"pos_emb": "learned"}))
    assert (
        cli.main(["generate", "--checkpoint", str(tmp_path / "learned"), "--prompt", LONG, "--max-new-tokens", "20"])
        == 2
    )
    assert "40 learned positions" in capsys.readouterr().err


@pytest.mark.parametrize("keys", [{"pos_emb": "learned"}, {"pos_emb": "xpos"}], ids=str)
def test_all_lengths_are_checked_first(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is generated or replaced, and every prompt that is too long is named."""
    write_checkpoint(tmp_path / "run", load_config([], KEYS | keys))
    if keys["pos_emb"] == "xpos":
        monkeypatch.setattr("megatron_coca.attention.positions.forms.SCALE_BASE", 0.3)  # reaches fewer positions
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("a", LONG, "b", LONG))
    )
    output = tmp_path / "out.jsonl"
    given = ["generate", "--checkpoint", str(tmp_path / "run"), "--file", str(tmp_path / "prompts.jsonl")]
    assert cli.main([*given, "--max-new-tokens", "20", "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert not output.exists() and error.count("shorten the prompt, or lower --max-new-tokens") == 2
    assert "prompts.jsonl:2: 33 tokens and 20 new ones" in error and "prompts.jsonl:4: 33 " in error
    assert cli.main([*given, "--max-new-tokens", "8", "--output", str(output)]) == 0  # 40 positions


def test_typed_prompts_beyond_the_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "run", load_config([], KEYS | {"pos_emb": "learned"}))
    type_lines(monkeypatch, LONG, "a")
    assert generate.main(["--checkpoint", str(tmp_path / "run"), *TEN]) == 0
    assert "beyond the 40 learned positions" in capsys.readouterr().err
    assert isinstance(sys.stdout, Terminal) and sys.stdout.getvalue() == expected(str(tmp_path / "run"), "a") + "\n\n"


def test_help_and_typing_errors_import_no_torch() -> None:
    code = (
        "import contextlib, io, sys\nfrom megatron_coca.commands.generate import main\n"
        "for arguments in (['--help'], ['--tempo', '1']):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()), "
        "contextlib.redirect_stderr(io.StringIO()):\n        main(arguments)\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_start_token_is_named_and_put_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config([], KEYS | {"vocab_size": 97, "tokenizer_type": "HFTokenizer"})
    write_checkpoint(tmp_path / "run", config, tokenizer=beginning_tokenizer(tmp_path))
    given = ["--checkpoint", str(tmp_path / "run"), "--prompt", "ab", *TEN]
    assert generate.main(given) == 0
    assert "add --start-token '<bos>'" in capsys.readouterr().err
    assert generate.main([*given, "--start-token", "<bos>"]) == 0
    shown = capsys.readouterr()
    assert (
        "--start-token" not in shown.err
        and shown.out == expected(str(tmp_path / "run"), "ab", start_token="<bos>") + "\n"
    )
    with pytest.raises(DataError, match="no symbol '<start>'"):
        generate.main([*given, "--start-token", "<start>"])
    with pytest.raises(EvaluationError, match="--start-token: not supported with --chat"):
        generate.main([*given, "--start-token", "<bos>", "--chat"])


def test_too_many_new_tokens_for_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12800000000000384 bytes")

    monkeypatch.setattr("megatron_coca.text_generation.generate_tokens", fail)
    saved = write_checkpoint(tmp_path / "run", load_config([], TINY))
    with pytest.raises(EvaluationError, match="cpu: out of memory; lower --max-new-tokens"):
        generate.main(["--checkpoint", str(saved), "--prompt", "a", "--device", "cpu"])
