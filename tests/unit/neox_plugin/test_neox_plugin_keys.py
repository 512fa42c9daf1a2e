"""The plugin for GPT-NeoX against a stub of the functions that it needs: keys, messages, launchers."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_coca.config import ConfigError
from megatron_coca.neox_plugin import __main__ as program
from megatron_coca.neox_plugin import activate
from megatron_coca.neox_plugin.keys import uses_plugin
from tests.conftest import ROOT, clean_environment
from tests.neox.stubbed import STUB, Upstream, stub

__all__ = ["stub"]


def test_without_a_key_of_ours_nothing_changes(stub: Upstream) -> None:
    before = vars(stub.arguments(pos_emb="rotary", optimizer={"type": "Adam", "params": {"lr": 1e-3}}))
    activate()
    after = vars(stub.arguments(pos_emb="rotary", optimizer={"type": "Adam", "params": {"lr": 1e-3}}))
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {
        *("pos_emb_options", "rotary_frequencies", "rope_scaling", "relative_positions", "logit_scaling"),
        *("attention_backend", "operand_kernel"),
        *("lr_warmup_init", "vocab_size"),
    }


def test_keys_of_our_recipe_have_the_same_meaning(stub: Upstream) -> None:
    activate()
    keys = yaml.safe_load((ROOT / "configs/350M/roformer_coca.yml").read_text())
    fields = stub["neox_arguments"].NeoXArgs.__dataclass_fields__
    keys |= {"max_position_embeddings": None}
    made = stub.arguments(**{name: value for name, value in keys.items() if name in fields})
    assert made.pos_emb == "coca" and made.lr_warmup_init == 1e-7 and made.lr_decay_style == "linear_to_min_lr"
    assert made.optimizer_type == "Adam", "the name that GPT-NeoX has for decoupled weight decay"
    assert made.gradient_accumulation_steps == 256 // 16, "the quotient of the two sizes"
    assert made.max_position_embeddings == made.seq_length == 512, "GPT-NeoX has no default for it"


def test_a_number_that_yaml_takes_for_text_and_null(stub: Upstream) -> None:
    activate()
    made = stub.arguments(pos_emb="rotary", lr_warmup_init="1e-7", logit_scaling=None, rope_scaling=None)
    assert made.lr_warmup_init == 1e-7 and made.logit_scaling == "none"
    assert not uses_plugin(made)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"pos_emb": "coca", "sliding_window_width": 8, "relative_positions": {"type": "rerope"}},
            "sliding_window_width: contradicts relative_positions",
        ),
        ({"pos_emb": "coca", "use_mup": True}, "use_mup: the plugin's attention"),
        ({"pos_emb": "coca", "te_mha": True}, "te_mha: Transformer Engine"),
        ({"pos_emb": "coca", "attention_config": ["global", "gmlp"]}, "attention_config: gmlp is not supported"),
        ({"pos_emb": "coca", "rope_scaling": {"type": "clex"}}, "rope_scaling: clex: GPT-NeoX has no weights"),
        ({"pos_emb": "coca", "logit_scaling": "ssmax"}, "^logit_scaling: ssmax: GPT-NeoX has no weights"),
        ({"pos_emb": "alibi", "logit_scaling": "log_n"}, "alibi needs GPT-NeoX's own attention"),
        ({"pos_emb": "rpe", "logit_scaling": "log_n"}, "rpe needs GPT-NeoX's own attention"),
        ({"pos_emb": "kerple_log"}, "pos_emb: kerple_log: .*has no weights"),
        ({"pos_emb": "coca", "rope_scaling": {"rope_type": "linear"}}, "^rope_scaling: rope_type linear needs factor"),
        ({"pos_emb": "coca", "rope_scaling": {"rope_typ": "linear"}}, "rope_typ"),
        ({"pos_emb": "none", "relative_positions": {"type": "rerope"}}, "relative_positions"),
        ({"pos_emb": "coca", "rope_scaling": "linear"}, "^rope_scaling: expected a mapping, .*got 'linear'"),
        (
            {"pos_emb": "coca", "relative_positions": {"type": "dual_chunk"}},
            "dual_chunk: the plugin has not been tested",
        ),
        ({"pos_emb": "rotary", "relative_positions": ["rerope"]}, "^relative_positions: expected a mapping"),
        ({"vocab_size": "10"}, "^vocab_size: expected an integer, got '10'"),
        ({"lr_warmup_init": "tiny"}, "^lr_warmup_init: expected a number"),
        ({"trainable": ["key"]}, "trainable: .*not by GPT-NeoX"),
        ({"reset_attention_mask": True, "pos_emb": "coca"}, "reset_attention_mask: .*not by GPT-NeoX"),
    ],
)
def test_unsupported_keys_are_an_error_with_the_reason(keys: dict[str, Any], message: str, stub: Upstream) -> None:
    activate()
    with pytest.raises(ValueError, match=message):
        stub.arguments(**keys)


@pytest.mark.parametrize(
    ("keys", "lines"),
    [
        ({"pos_emb": "cocaa"}, ["pos_emb: `cocaa` is not .*learned | rotary | .*`coca`"]),
        ({"pos_emb": None}, ["pos_emb: `None` is not one of"]),
        ({"rope_scalling": {}}, ["rope_scalling: not a key .*`rope_scaling`"]),
        ({"logit_scaling": "logn", "tpyo": 1}, ["tpyo: not a key of GPT-NeoX or", "logit_scaling: `logn` .* `log_n`"]),
        ({"lr_decay_style": "liner", "pos_emb": "ROTARY"}, ["lr_decay_style: `liner` is not .*constant | linear"]),
    ],
)
def test_a_misspelt_key_is_an_error_with_a_suggestion(keys: dict[str, Any], lines: list[str], stub: Upstream) -> None:
    activate()
    with pytest.raises(ConfigError) as caught:
        stub.arguments(**keys)
    assert len(caught.value.problems) == len(lines)
    for line, expected in zip(caught.value.problems, lines, strict=True):
        assert re.match(expected.replace("|", r"\|"), line), line


def test_the_launcher_ends_with_our_message_and_no_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys, megatron.neox_arguments as m; m.NeoXArgs.from_ymls(sys.argv[1:])")
    (tmp_path / "model.yml").write_text("pos_emb: cocaa")
    command = [sys.executable, "-m", "megatron_coca.neox_plugin", str(script), "model.yml"]
    environment = clean_environment({"PYTHONPATH": os.pathsep.join([str(STUB), str(ROOT)])})
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith("megatron_coca.neox_plugin: pos_emb: `cocaa`")


def test_keys_of_ours_that_change_no_result_are_left_out(stub: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    activate()
    stub.arguments(loss_chunk_size=128, torch_compile=True)
    assert "loss_chunk_size, torch_compile: no effect" in caplog.text


@pytest.mark.parametrize(
    ("vocabulary", "ranks", "rows"), [(100, 1, 128), (200, 1, 256), (300, 2, 384), (300, 3, 384), (None, 1, 128)]
)
def test_rows_of_the_embedding(vocabulary: int | None, ranks: int, rows: int, stub: Upstream) -> None:
    activate()
    made = stub.arguments(vocab_size=vocabulary, model_parallel_size=ranks)
    made.build_tokenizer()
    assert made.padded_vocab_size == rows


def test_a_vocabulary_that_is_too_small_is_an_error(stub: Upstream) -> None:
    activate()
    with pytest.raises(ValueError, match="vocab_size: 99 is too small, .*100 tokens"):
        stub.arguments(vocab_size=99).build_tokenizer()


@pytest.fixture
def launched(stub: Upstream) -> list[str]:
    """What DeepSpeed's launcher is given."""
    activate()
    return stub.arguments(user_script="train.py").get_deepspeed_main_args()


def test_processes_run_the_plugin_and_it_the_script(launched: list[str]) -> None:
    at = launched.index("train.py")
    assert launched[at - 1] == program.__file__ and launched[at + 1] == "--deepspeed_config"


@pytest.mark.parametrize("launcher", ["PDSH", "OpenMPI", "MVAPICH", "Slurm"])
def test_every_launcher_of_deepspeed_passes_it_on(
    launcher: str, launched: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from deepspeed.launcher import multinode_runner, runner

    monkeypatch.setattr(multinode_runner, "MVAPICH_TMP_HOSTFILE", str(tmp_path / "hosts"))
    arguments = runner.parse_args(launched)
    made = getattr(multinode_runner, f"{launcher}Runner")
    hosts = {"one": [0, 1], "two": [0, 1]}
    given = [arguments, "e30=", *([] if launcher == "PDSH" else [{"one": 2, "two": 2}])]
    backend = made(*given)
    command = backend.get_cmd({"PATH": "/bin"}, hosts)
    command = command[0] if isinstance(command, tuple) else command
    text = " ".join(command)
    assert f"{program.__file__} train.py --deepspeed_config" in text.replace("'", "")
    assert "--module" not in text


@pytest.mark.parametrize("arguments", [[], ["--help"], ["nowhere.py", "-d", "configs"], ["--local_rank=1"]])
def test_misuse_of_the_launcher(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: python -m megatron_coca.neox_plugin SCRIPT.py") and "no such file" in said


def test_an_incompatible_checkout_ends_with_its_message(
    stub: Upstream, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(stub["mpu"], "get_cuda_rng_tracker")
    assert program.main([str(STUB / "train.py")]) == 2
    assert "get_cuda_rng_tracker" in capsys.readouterr().err


def test_a_script_runs_as_without_the_plugin() -> None:
    """Arguments and exit status are the script's, and the plugin is active; started by path, as DeepSpeed does."""
    rank = ["--local_rank=3"]  # test_the_launcher_ends_with_our_message_and_no_traceback runs without it
    command = [sys.executable, program.__file__, *rank, "train.py", "-d", "configs", "a b", ""]
    environment = clean_environment({"PYTHONPATH": str(ROOT)})
    done = subprocess.run(command, cwd=STUB, env=environment, capture_output=True, text=True, check=False)
    expected = ["train.py", *rank, "-d", "configs", "a b", ""]
    assert done.stdout == f"{expected} {[str(STUB)]} True\n" and done.returncode == 7, done
