"""TensorBoard files."""

from megatron_coca.sinks.declaration import Metrics, MetricSink, RunFacts, SinkOption, register_sink


@register_sink
class TensorBoard(MetricSink):
    """Writes metrics as scalars and notes as text. In a resumed run, earlier values of repeated steps are hidden."""

    name = "tensorboard"
    key = "tensorboard_dir"
    extra = "logging"
    options = (SinkOption("folder", "folder", key="tensorboard_dir"),)

    def __init__(self, run: RunFacts, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter  # optional dependency

        self._writer = SummaryWriter(folder, purge_step=run.start + 1)

    def report(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def note(self, step: int, message: str) -> None:
        self._writer.add_text("event", message, step)

    def close(self) -> None:
        self._writer.close()
