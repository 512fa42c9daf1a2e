"""Settings of an engine from files and options."""

from argparse import ArgumentParser
from pathlib import Path

import pytest

from megatron_coca.work.settings import ClusterError, EngineSettings, add_engine_options, engine_of, without_engine

ROOT = Path(__file__).parents[3]


def settings(*arguments: str) -> EngineSettings | None:
    parser = ArgumentParser()
    add_engine_options(parser)
    return engine_of(parser.parse_args(arguments))


def test_options_win_over_the_file(tmp_path: Path) -> None:
    assert settings() is None
    file = tmp_path / "engine.yaml"
    file.write_text('engine: slurm\ntasks: 4\ngpus: 1\ntime: "1:00:00"\nsbatch_args: {account: me, mem: 4G}\n')
    read = settings("--engine", str(file), "--tasks", "7")
    assert read is not None and (read.tasks, read.gpus, read.time) == (7, 1, "1:00:00")
    assert read.sbatch_args == {"account": "me", "mem": "4G"}


@pytest.mark.parametrize("file", sorted((ROOT / "configs/cluster").glob("*_*.yaml")), ids=lambda file: file.stem)
def test_shipped_files(file: Path) -> None:
    if "engine:" in file.read_text():
        assert settings("--engine", str(file)) is not None


@pytest.mark.parametrize(
    ("text", "given", "message"),
    [
        ("engine: slurm\ntime: 12:00:00", [], 'time: .*put it in quotes, such as "12:00:00"'),
        ("engine: slurm\nqueue: gpu", [], "queue: .*known keys: engine, tasks"),
        ("engine: moab", [], "engine: .*known keys"),
        ("engine: local\npartition: gpu", [], "partition: not supported .*engine local; .*use one of"),
        ("engine: " + "[" * 3000, [], "engine.yml:1: not valid YAML: nested .* 64"),
        ("engine: local\nengine: ray", [], "engine.yml:2: .*'engine' is given twice"),
        ("- a", [], "has no keys; set at least engine"),
        (None, ["--engine", "ray", "--time", "1:00"], "--engine: time: not supported by the engine ray"),
        (None, ["--gpus", "1"], "--gpus: has no effect without --engine; add --engine"),
        (None, ["--engine", "none.yml"], "none.yml: cannot be read"),
    ],
)
def test_errors_name_place_and_remedy(text: str | None, given: list[str], message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "engine.yml").write_text(text)
        given = ["--engine", str(tmp_path / "engine.yml")]
    with pytest.raises(ClusterError, match=message):
        settings(*given)


def test_a_task_gets_the_other_arguments() -> None:
    line = ["RECIPE.yml", "--engine", "slurm", "--root", "/x", "--tasks=4", "--cpus", "2", "--input", "a=b", "c=d"]
    assert without_engine(line) == ["RECIPE.yml", "--root", "/x", "--input", "a=b", "c=d"]
