"""The sink of docs/observability.md: declared in a user's file, trained with, and kept out of checkpoints."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_coca import methods
from megatron_coca.config import ConfigError, load_config, load_saved_config
from megatron_coca.sinks import SINKS, MetricSink, register_sink
from megatron_coca.training.sinks import metric_folders, open_sinks

ROOT = Path(__file__).parents[3]
SHAPE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 64}
SHAPE |= {"train_iters": 10}


@pytest.fixture
def guide(tmp_path: Path) -> Iterator[Path]:
    """The configuration of the guide beside its file, which is forgotten afterwards."""
    page = (ROOT / "docs/observability.md").read_text().partition("\n## A sink of your own\n")[2].partition("\n## ")[0]
    (source,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (keys,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    before, scalings = dict(SINKS), methods.TABLES["logit_scaling"]
    known = dict(scalings)
    (tmp_path / "csv_sink.py").write_text(source)
    (tmp_path / "run.yml").write_text(keys)
    yield tmp_path / "run.yml"
    for table, kept in ((SINKS, before), (scalings, known)):
        table.clear()
        table.update(kept)
    for name in [name for name in sys.modules if name.startswith("megatron_coca_imports.")]:
        del sys.modules[name]


def test_it_receives_the_metrics(guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(guide.parent)
    config = load_config([guide], SHAPE | {"metric_sinks.csv.separator": ";"})
    (key,), (folder,) = zip(*metric_folders(config).items(), strict=True)
    assert (key, folder) == ("metric_sinks.csv.folder", "runs/losses")
    Path(folder).mkdir(parents=True)  # as the lock on the folder does
    sinks = open_sinks(config, 0)
    for sink in sinks:
        sink.report(1, {"loss": 2.5})
        sink.report(2, {"loss": None})
        sink.note(2, "odd")
        sink.close()
    assert Path("runs/losses/losses.csv").read_text() == "1;2.5\n"


def test_a_resumed_run_repeats_no_line(guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch is killed while it writes a line; the second one resumes from step 2, and the third is a new run,
    which keeps the lines of the other.
    """
    monkeypatch.chdir(guide.parent)
    config, losses = load_config([guide], SHAPE), Path("runs/losses/losses.csv")
    losses.parent.mkdir(parents=True)
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4)), (0, (1,))):
        sinks = open_sinks(config, start)
        for step in steps:
            for sink in sinks:
                sink.report(step, {"loss": step / 2})
            lines = ["1,0.5", "2,1.0", "3,1.5", "4,2.0"][:step]
            assert losses.read_text().splitlines() == lines, f"resumed from step {start}, before it is closed"
        for sink in sinks:
            sink.close()
        losses.write_text(losses.read_text() + "1")
    (older,) = losses.parent.glob("losses_*.csv")
    assert older.read_text().splitlines() == ["1,0.5", "2,1.0", "3,1.5", "4,2.0", "1"]


def test_its_options_are_checked(guide: Path) -> None:
    for keys, message in {
        "metric_sinks.csv.folder=null": "metric_sinks.csv.folder: required, but missing",
        "metric_sinks.csv.seperator=a": "did you mean `metric_sinks.csv.separator`",
        "metric_sinks.cvs.folder=a": "did you mean `metric_sinks.csv`",
        "metric_sinks.csv=3": "metric_sinks.csv: expected a mapping, got 3",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_config([SHAPE, guide], [keys])


def test_a_checkpoint_needs_neither_the_file_nor_the_sink(guide: Path) -> None:
    """Its file may change between launches, because no weights depend on it."""
    config = load_config([SHAPE, guide])
    assert config.position.imports == [str(guide.parent / "csv_sink.py")]
    assert load_config(config.flat()) == config
    record = guide.parent / "config.yml"
    record.write_text(config.record())
    assert "csv" not in record.read_text()
    saved = load_saved_config(record, {"imports": config.position.imports}, same=True).config
    assert saved.logging.metric_sinks == {} and load_saved_config(record).config == load_config(SHAPE)


def test_a_file_with_a_method_keeps_its_digest(guide: Path) -> None:
    own = guide.parent / "csv_sink.py"
    declared = "from megatron_coca import LogitScaling, register\n"
    declared += 'register(LogitScaling("with_sink", "x", "y"), lambda positions, length: positions)\n'
    own.write_text(own.read_text() + declared)
    (name,) = load_config([SHAPE, guide]).position.imports
    assert re.fullmatch(r".*csv_sink.py#sha256=\w+", name)


def test_a_checkpoint_that_selects_a_sink_is_not_obeyed(guide: Path, tmp_path: Path) -> None:
    """Nor is the file run that it names."""
    folder = tmp_path / "run" / "global_step7"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({}))
    (folder / "config.yml").write_text(guide.read_text().replace("csv_sink.py", "../../csv_sink.py"))
    with pytest.raises(ConfigError) as caught:
        load_config([SHAPE, folder / "config.yml"])
    assert "csv_sink.py: not run" in str(caught.value) and "csv" not in SINKS


def test_a_built_in_sink_is_not_replaced() -> None:
    class Other(MetricSink):
        name = "mlflow"

    with pytest.raises(ValueError, match="metric_sinks: mlflow is a built-in sink"):
        register_sink(Other)
