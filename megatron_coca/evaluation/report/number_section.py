"""The report section of a task that declares numbers, but no layout of its own: tables and plots by length."""

from typing import Any

from megatron_coca.evaluation.declaration import Task, TaskSection
from megatron_coca.evaluation.numbers import Number
from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.document import ReportBlock
from megatron_coca.evaluation.report.metrics import measure_of, metric_of
from megatron_coca.evaluation.report.plots.panels import axis_of
from megatron_coca.evaluation.report.reading import ResultGroup
from megatron_coca.evaluation.report.result_tables import LengthTable, ReportOptions
from megatron_coca.evaluation.results import Record


def number_blocks(task: Task, section: TaskSection) -> shared.ResultBuilder:
    """Return the builder of the section. Entries of the task must have the length as their only key."""

    @shared.grouped(section.name, task.comparable)
    def blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
        tables, figures = [], []
        for place, number in enumerate(task.numbers):
            metric, suffix, panel = metric_of(number, task.at), f"-{place + 1}" if place else "", _panel(number)
            caption = f"{_capital(number.shown_as)} by length" + (f", {number.unit}" if number.unit else "")
            measure = measure_of(number) if number.best != "neither" else None
            head = f"{number.shown_as} at length"
            spec = LengthTable(caption, head, {"{}": metric}, suffix, number.published, measure=measure)
            tables += shared.length_tables(name, [spec], group, options)
            figures += shared.length_figure(name + suffix, caption, group, metric, panel, f"{caption}.", options)
        return ReportBlock((f"Protocol: {_described(group.first.protocol)}.",), tuple(figures), tuple(tables))

    return blocks


def _described(protocol: Record) -> str:
    """Return the field `text` of a protocol, and its other fields with their values."""
    fields = {name: value for name, value in protocol.model_dump().items() if value is not None}
    text = fields.pop("text", None)
    named = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in fields.items())
    return "; ".join(filter(None, (text, named)))


def _panel(number: Number) -> dict[str, Any]:
    """Return the fields of `Panel` for a declared number."""
    name = f"{number.shown_as} ({number.unit})" if number.unit else number.shown_as
    return {"x_label": "length (tokens)", "y_label": name, **axis_of(number)}


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
