"""MLflow and Comet: what their libraries receive, from new runs and from resumed ones."""

import logging
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest

from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.sinks import mlflow, waiting
from megatron_coca.training.sinks import adopt_metrics, metric_folders, open_sinks

SHAPE = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 16,
    "vocab_size": 64,
    "train_iters": 10,
}


def configured(folder: Path, **options: Any) -> Config:
    return load_config([], SHAPE | {"save": str(folder), "metric_sinks": options})


def report(config: Config, start: int, stop: int, run: str | None = None) -> None:
    sinks = open_sinks(config, start, run)
    for step in range(start + 1, stop + 1):
        for sink in sinks:
            sink.report(step, {"loss": 1.0 / step, "grad_norm": None})
    for sink in sinks:
        sink.note(stop, "odd")
        sink.close()


class Recorded:
    """Stand-ins for both libraries. They record every call, and the ids of the runs that were begun."""

    def __init__(self, failure: Exception | None = None, delay: float = 0.0) -> None:
        self.failure, self.delay = failure, delay
        self.begun: list[str] = []
        self.continued: list[str] = []
        self.sent: list[tuple[str, int]] = []
        self.values: dict[str, Any] = {}
        self.notes: list[str] = []
        self.ended = 0

    def begin(self, known: str | None) -> str:
        time.sleep(self.delay)
        if self.failure is not None:
            raise self.failure
        (self.begun if known is None else self.continued).append(known or f"run{len(self.begun) + 1}")
        return known or self.begun[-1]

    def end(self) -> None:
        self.ended += 1

    def modules(self) -> dict[str, ModuleType]:
        """The modules that the sinks import, by name."""
        made = {name: ModuleType(name) for name in ("mlflow", "mlflow.entities", "comet_ml")}
        vars(made["mlflow"])["MlflowClient"] = lambda tracking_uri: Client(self, tracking_uri)
        for name, fields in {"Metric": 4, "Param": 2, "RunTag": 2}.items():
            vars(made["mlflow.entities"])[name] = lambda *given, fields=fields: self._entity(given, fields)
        vars(made["comet_ml"]).update(start=self._start, ExperimentConfig=SimpleNamespace)
        return made

    def _entity(self, given: tuple[Any, ...], fields: int) -> tuple[Any, ...]:
        assert len(given) == fields
        return given

    def _start(self, **given: Any) -> SimpleNamespace:
        assert given["mode"] == ("get" if given["experiment_key"] else "create")
        run = self.begin(given["experiment_key"])
        return SimpleNamespace(
            get_key=lambda: run,
            log_metrics=lambda metrics, step: self.sent.append((run, step)),
            log_parameters=self.values.update,
            log_text=lambda text, step: self.notes.append(text),
            end=self.end,
        )


class Client:
    """MLflow's client."""

    def __init__(self, recorded: Recorded, tracking_uri: str | None) -> None:
        self.recorded, self.tracking_uri = recorded, tracking_uri

    def get_experiment_by_name(self, name: str) -> None: ...

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment_id: str, run_name: str | None = None) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=self.recorded.begin(None)))

    def update_run(self, run_id: str, status: str) -> None:
        self.recorded.begin(run_id)

    def log_batch(
        self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = (), synchronous: bool = True
    ) -> Any:
        assert len(params) <= 100
        self.recorded.sent += [(run_id, step) for _, _, _, step in metrics]
        self.recorded.values |= dict(params)
        self.recorded.notes += [text for _, text in tags]
        return SimpleNamespace(wait=lambda: None)

    def set_terminated(self, run_id: str) -> None:
        self.recorded.end()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    logging.getLogger("megatron_coca").setLevel(logging.NOTSET)
    return caplog


def stand_in(patch: pytest.MonkeyPatch, recorded: Recorded) -> Recorded:
    for name, module in recorded.modules().items():
        patch.setitem(sys.modules, name, module)
    return recorded


@pytest.mark.parametrize("name", ["mlflow", "comet"])
def test_a_resumed_run_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every step is sent once; a run that starts again is another one."""
    fake, config = stand_in(monkeypatch, Recorded()), configured(tmp_path, **{name: {}})
    for start, stop in ((0, 7), (5, 10), (0, 2)):
        report(config, start, stop)
    assert fake.begun == ["run1", "run2"] and fake.continued == ["run1"]
    assert fake.sent == [("run1", step) for step in range(1, 11)] + [("run2", 1), ("run2", 2)]
    assert fake.notes == ["odd"] * 3 and fake.ended == 3
    assert fake.values["num_layers"] in (1, "1") and {"seq_length", "rope_scaling"} <= fake.values.keys()


@pytest.mark.parametrize("name", ["mlflow", "comet"])
def test_the_copy_of_a_run_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake, config = stand_in(monkeypatch, Recorded()), configured(tmp_path, **{name: {}})
    report(config, 0, 3, run="one")
    adopt_metrics(tmp_path, "one", "two")
    report(config, 3, 4, run="two")
    assert fake.begun == ["run1", "run2"] and not fake.continued


@pytest.mark.parametrize("name", ["mlflow", "comet"])
@pytest.mark.parametrize("fault", ["refuses", "does not answer"])
def test_a_service_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture, name: str, fault: str
) -> None:
    """A new run stops, and a resumed run continues without the service."""
    monkeypatch.setattr(sys.modules[f"megatron_coca.sinks.{name}"], "SECONDS", 0.2)
    fake = Recorded(RuntimeError("refuses")) if fault == "refuses" else Recorded(delay=1.0)
    stand_in(monkeypatch, fake)
    config = configured(tmp_path, **{name: {}})
    with pytest.raises(ConfigError, match=f"metric_sinks.{name}: .*{fault}"):
        open_sinks(config, 0)
    report(config, 3, 4)
    assert f"metric_sinks.{name}: " in warnings.text and "training continues without it" in warnings.text
    assert not fake.sent and (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_a_missing_library_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in {"mlflow": "mlflow", "comet": "comet_ml"}.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=rf"metric_sinks.{name}: .*pip install 'megatron-coca\[{name}\]'"):
            open_sinks(configured(tmp_path, **{name: {}}), 0)


def test_long_values_and_many_keys_fit_into_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = stand_in(monkeypatch, Recorded())
    config = configured(tmp_path, mlflow={"run_name": "n" * 9000})
    report(config, 0, 1)
    assert len(fake.values) == len(config.flat()) > mlflow.MOST_PARAMETERS
    assert len(fake.values["metric_sinks"]) == mlflow.MOST_LETTERS


def test_a_call_is_ended_or_its_error_is_raised() -> None:
    assert waiting.within(5, "it", lambda: 3) == 3
    with pytest.raises(KeyError):
        waiting.within(5, "it", lambda: {}["a"])
    with pytest.raises(TimeoutError, match=r"it does not answer within 0.05 s"):
        waiting.within(0.05, "it", lambda: time.sleep(1))


def test_the_folders_of_all_sinks_are_known(tmp_path: Path) -> None:
    config = configured(tmp_path, comet={"folder": "~/comet"}, mlflow={})
    given = config.override({"tensorboard_dir": "board", "log_dir": "logs"})
    home = os.path.expanduser("~/comet")
    assert metric_folders(given) == {"log_dir": "logs", "tensorboard_dir": "board", "metric_sinks.comet.folder": home}
    assert metric_folders(config.override({"metric_sinks.comet": None})) == {}


def test_the_real_library_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = (tmp_path / "store").as_uri()
    config = configured(tmp_path / "run", mlflow={"tracking_uri": store, "experiment": "ours", "run_name": "first"})
    report(config, 0, 3)
    report(config, 2, 4)
    client = library.MlflowClient(tracking_uri=store)
    (run,) = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
    assert run.info.run_name == "first" and run.info.status == "FINISHED"
    assert run.data.params["num_layers"] == "1" and run.data.tags["event_4"] == "odd"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((each.step, each.value) for each in history) == [(step, 1.0 / step) for step in (1, 2, 3, 4)]


def test_the_real_library_of_comet(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml")
    config = configured(tmp_path / "run", comet={"project": "ours", "folder": str(tmp_path / "comet")})
    report(config, 0, 3)
    report(config, 2, 4)
    stored = sorted((tmp_path / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime)
    assert len({path.name[:32] for path in stored}) == 1 and len(stored) == 2, "one run, of two launches"
    texts = [b"".join(ZipFile(path).read(name) for name in ZipFile(path).namelist()).decode() for path in stored]
    assert '"ours"' in texts[0] and '"num_layers"' in texts[0]
    assert [text.count('"loss"') > 0 for text in texts] == [True, True]
