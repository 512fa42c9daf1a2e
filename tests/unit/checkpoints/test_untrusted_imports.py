"""No command runs a file of Python that a checkpoint names: each says which file, and how the user would name it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_coca import cli, load_model, methods
from megatron_coca.ablation.file import read_ablation
from megatron_coca.ablation.grid import expand
from megatron_coca.checkpoints import CheckpointError, native, open_checkpoint
from megatron_coca.checkpoints.exporting import export
from megatron_coca.config import ConfigError, load_config
from megatron_coca.evaluation.options import SubjectOptions, Variant
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.subject import Evaluation
from megatron_coca.model import build_model
from tests.checkpoint_files import TINY, write_checkpoint
from tests.neox_files import write_neox

NOT_RUN = "not run, because checkpoints may be untrusted"
METHOD = (
    "from megatron_coca import LogitScaling, register\n"
    "register(LogitScaling('mine', 'mine', 'here'), lambda positions, length: 1 + 0 * positions)\n"
)
COMMANDS: dict[str, list[str]] = {
    "evaluate": ["evaluate", "passkey", "--checkpoint", "RUN", "--lengths", "64", "--output", "OUT"],
    "evaluate a variant": ["evaluate", "passkey", "--checkpoint", "RUN", "--lengths", "64", "--variant", "a", "seed=1"],
    "speed": ["evaluate", "speed", "--checkpoint", "RUN", "--lengths", "8", "--what", "decode", "--rounds", "1"],
    "generate": ["generate", "--checkpoint", "RUN", "--prompt", "a", "--max-new-tokens", "1"],
    "export": ["export", "huggingface", "RUN", "OUT"],
    "export to GPT-NeoX": ["export", "neox", "RUN", "OUT"],
    "import": ["import", "RUN", "OUT"],
    "train from a folder": ["train", "RUN", "train_iters=1", "optimizer.params.lr=0.1"],
}


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """What evil.py writes when it is run; no test may leave it."""
    marker = tmp_path / "marker"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n" + METHOD)
    before = {key: dict(table) for key, table in methods.TABLES.items()}
    yield marker
    for key, table in before.items():
        methods.TABLES[key].clear()
        methods.TABLES[key].update(table)


def crafted(tmp_path: Path, **keys: Any) -> Path:
    """A checkpoint with these keys in its configuration, and a manifest that fits."""
    save = write_checkpoint(tmp_path / "run", load_config([], TINY))
    folder = save / "global_step7"
    config = yaml.safe_load((folder / native.CONFIG).read_text()) | keys
    (folder / native.CONFIG).write_text(yaml.safe_dump(config))
    manifest = native.read_json(folder / native.MANIFEST)
    manifest["files"][native.CONFIG] = native.describe(folder / native.CONFIG)
    native.write_json(folder / native.MANIFEST, manifest)
    return save


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_commands(command: list[str], marker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = crafted(tmp_path, imports=[str(tmp_path / "evil.py")])
    places = {"RUN": str(run), "OUT": str(tmp_path / "out")}
    assert cli.main([places.get(word, word) for word in command]) == 2
    said = capsys.readouterr().err
    assert f"imports: {tmp_path / 'evil.py'}: {NOT_RUN}" in said and "imports=[FILE]" in said
    assert not marker.exists()


@pytest.mark.parametrize(
    "keys",
    [
        {"imports": ["../../evil.py"]},
        {"imports": "evil.py"},
        {"imports": {"a": "evil.py"}},
        {"stages": [{"until": 1, "imports": ["EVIL"]}, {}], "train_iters": 2},
        {"layer_types": {"a": {"imports": ["EVIL"]}}},
    ],
    ids=["beside it", "text", "mapping", "in a stage", "in a type of layers"],
)
@pytest.mark.parametrize("by", ["path", "URL"])
def test_spellings(
    keys: dict[str, Any], by: str, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where downloads are kept
    text = json.dumps(keys).replace("EVIL", str(tmp_path / "evil.py"))
    run = crafted(tmp_path, **json.loads(text))
    with pytest.raises(ConfigError, match="imports"):
        load_model(run.as_uri() if by == "URL" else run)
    assert not marker.exists()


PLACES = {
    "run/global_step7/config.yml": "",
    "run/renamed/config.yml": "manifest.json",
    "data/data.yml": "",
    "data/other.yml": "manifest.json",
    "neox/global_step7/configs/a.yml": "",
    "neox/renamed/configs/a.yml": "../mp_rank_00_model_states.pt",
}


@pytest.mark.parametrize("by", ["path", "relative path", "link"])
@pytest.mark.parametrize(("place", "beside"), PLACES.items())
def test_a_file_of_a_checkpoint_or_of_data_as_configuration(
    place: str, beside: str, by: str, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such files come with a checkpoint or data. The same key in the user's own file or override is run."""
    file = tmp_path / place
    file.parent.mkdir(parents=True)
    if beside:
        (file.parent / beside).write_text("{}")
    keys = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 4}
    file.write_text(yaml.safe_dump(keys | {"imports": [str(tmp_path / "evil.py")]}))
    if by == "relative path":
        monkeypatch.chdir(file.parent)
        file = Path(file.name)
    elif by == "link":
        (tmp_path / "link.yml").symlink_to(file)
        file = tmp_path / "link.yml"
    with pytest.raises(ConfigError, match=f"{file.name}:.*imports: {tmp_path / 'evil.py'}: {NOT_RUN}"):
        load_config([file])
    assert not marker.exists()
    load_config([file], [f"imports=[{tmp_path / 'evil.py'}]"])
    assert marker.exists()


def test_inspect_shows_it_without_running_it(marker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = crafted(tmp_path, imports=["../evil.py"], logit_scaling="mine")
    assert cli.main(["inspect", "checkpoint", str(run), "--json", str(tmp_path / "facts.json")]) == 0
    text = capsys.readouterr().out
    assert "imports: ../evil.py (Python file, was not run)" in text
    assert "logit_scaling: mine" in text and "hidden_size: 32" in text
    assert json.loads((tmp_path / "facts.json").read_text())[0]["imports"] == ["../evil.py"]
    assert not marker.exists()


def test_a_checkpoint_of_neox(marker: Path, tmp_path: Path) -> None:
    keys = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 16, "pos_emb": "rotary"}
    keys |= {"vocab_size": 128, "no_weight_tying": True}
    folder = write_neox(tmp_path / "neox", keys, build_model(load_config([], keys)).state_dict())
    (folder / "configs" / "z.yml").write_text(f"imports: [{tmp_path / 'evil.py'}]\n")
    with pytest.raises(CheckpointError, match=rf"configs: imports: {tmp_path / 'evil.py'}: {NOT_RUN}"):
        open_checkpoint(tmp_path / "neox")
    assert not marker.exists()
    open_checkpoint(tmp_path / "neox", overrides={"imports": [tmp_path / "evil.py"]})
    assert marker.exists()


def test_weights_that_an_ablation_or_a_suite_names(marker: Path, tmp_path: Path, small: dict[str, Any]) -> None:
    run, base = crafted(tmp_path, imports=[str(tmp_path / "evil.py")]), tmp_path / "base.yml"
    base.write_text(yaml.safe_dump(small | {"load": str(run), "finetune": True}))
    tasks = {"passkey": {"lengths": "512"}}
    ablation = {"title": "a", "base": [str(base)], "seeds": [1], "models": {"a": []}, "tasks": tasks}
    ablation |= {"results": str(tmp_path / "results"), "runs": str(tmp_path / "runs")}
    (tmp_path / "ablation.yml").write_text(yaml.safe_dump(ablation))
    with pytest.raises(EvaluationError, match=NOT_RUN):
        expand(read_ablation(tmp_path / "ablation.yml"))
    (tmp_path / "suite.yml").write_text(yaml.safe_dump({"title": "s", "checkpoints": {"a": str(run)}, "tasks": tasks}))
    assert cli.main(["evaluate", "suite", str(tmp_path / "suite.yml"), "--output", str(tmp_path / "out")]) == 2
    assert not marker.exists()
    base.write_text(yaml.safe_dump(small | {"imports": ["evil.py"]}))
    (cell,) = expand(read_ablation(tmp_path / "ablation.yml"))
    (arguments,) = [command.arguments for command in cell.commands]
    own = arguments[arguments.index("--set") + 1]
    assert own.startswith(f'imports=["{tmp_path / "evil.py"}#sha256=')
    assert marker.exists()


def test_a_hugging_face_model(marker: Path, tmp_path: Path) -> None:
    folder = export(write_checkpoint(tmp_path / "run", load_config([], TINY)), tmp_path / "hf").folder
    config = json.loads((folder / "config.json").read_text())
    config["position"] |= {"imports": [str(tmp_path / "evil.py")]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"position\.imports: not known"):
        load_model(folder)
    del config["position"]["imports"]
    (folder / "config.json").write_text(json.dumps(config | {"imports": [str(tmp_path / "evil.py")]}))
    with pytest.raises(CheckpointError, match="imports: not supported"):
        load_model(folder)
    assert not marker.exists()


def test_a_result_names_a_file_with_other_contents(marker: Path, tmp_path: Path) -> None:
    """The user's file serves all variants; a file moved elsewhere is the same method."""
    file = tmp_path / "mine.py"
    file.write_text(METHOD)
    run = write_checkpoint(tmp_path / "run", load_config([], TINY | {"imports": [str(file)], "logit_scaling": "mine"}))
    file = file.rename(tmp_path / "moved.py")
    variants = (Variant("one", (), (f"imports=[{file}]",)), Variant("two", (), ("attention_backend=reference",)))
    options = SubjectOptions(str(run), variants, "cpu", "float32", None, False)

    def overrides() -> list[dict[str, Any]]:
        return [subject.header.overrides for subject in Evaluation(options, "passkey").subjects()]

    assert overrides() == [{}, {"attention_backend": "reference"}]
    file.write_text(f"{METHOD}\nchanged = 1\n")
    named = [each["imports"] for each in overrides()]
    assert named[0] == named[1] and named[0][0].startswith(f"{file}#sha256=")
