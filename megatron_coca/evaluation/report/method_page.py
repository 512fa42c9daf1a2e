"""One page that compares position methods by scores, wavelengths, phases, biases, logit factors and layers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from megatron_coca.attention.build import build_method
from megatron_coca.attention.inputs import DistanceBias, bias_of_pairs
from megatron_coca.attention.method import PositionEncoding, PositionMethod
from megatron_coca.config import Config, ConfigError, PositionConfig
from megatron_coca.config.data import window_tokens
from megatron_coca.config.model import GAU
from megatron_coca.evaluation.distance_sweep import DistanceSweep, rotary_frequencies, rotated_distances
from megatron_coca.evaluation.labels import plot_text
from megatron_coca.evaluation.report.document import (
    ReportBlock,
    ReportDocument,
    Section,
    Table,
    TableCell,
    TableRow,
    html_page,
)
from megatron_coca.evaluation.report.plots.figures import Figure, Layout, svgs
from megatron_coca.evaluation.report.plots.looks import look_of, numbered
from megatron_coca.evaluation.report.plots.panels import SHARES, Line, Panel, panels

POINTS = 400
"""Number of distances at which scores and biases are drawn."""
PAIRS = 64
"""Number of random queries. Their mean score is drawn, so that no single query determines the curve."""
MOST_HEADS = 8
"""Largest number of heads for which the bias is drawn; with more heads, evenly spaced heads are chosen."""
FULL_CIRCLE = 2 * math.pi
CAPTIONS = {
    "scores": f"The score of a query at the end of the input with a key of the same vector: the mean over {PAIRS} "
    "normal vectors and all heads, without bias and gates. There is no line at distances that the method hides. For "
    "CoCA the key's vector is used as the T projection.",
    "wavelengths": "Tokens in one full rotation of each frequency. The dotted line is the training length: longer "
    "rotations are only partly seen in training. Frequencies of 0 are left out.",
    "phases": "The share of the circle that a frequency's rotations reach in this input but never reached in "
    "training; it is 0 if every phase occurred in training.",
    "biases": f"The bias on the scores of a query at the end of the input, for at most {MOST_HEADS} heads.",
    "logits": "The factor on a query's scores: logit scaling, and the temperature of the extension.",
    "layers": "The type of every layer.",
}


@dataclass(frozen=True)
class ShownMethod:
    """The position method of one layer type in evaluation.

    Attributes:
        model: the model's label, followed by the layer type if the model has several types.
        variant: the label of the overrides in evaluation.
        layers: the number of layers with this method.
        config, position: the configuration in evaluation; `position` contains the layer type's keys.
        trained, trained_position: the configuration in training, without the variant.
        encoding: computes the position tables; learned weights have their initial values.
        length: the input length in tokens.
        layer_type: the name of the layer type.
    """

    model: str
    variant: str
    layers: int
    config: Config
    position: PositionConfig
    trained: Config
    trained_position: PositionConfig
    encoding: PositionEncoding
    length: int
    layer_type: str

    @property
    def label(self) -> str:
        return f"{self.model} + {self.variant}" if self.config is not self.trained else self.model

    @property
    def method(self) -> PositionMethod:
        return self.encoding.method

    @property
    def method_name(self) -> str:
        """The name of the distance map if there is one, otherwise of the RoPE extension, otherwise `pos_emb`."""
        position = self.position if self.config is not self.trained else self.trained_position
        changed = position.relative_positions or position.rope_scaling
        return changed.declaration.name if changed is not None else position.pos_emb

    @property
    def training_length(self) -> int:
        return self.trained.model.seq_length


def shown_methods(model: str, variant: str, trained: Config, evaluated: Config, length: int) -> list[ShownMethod]:
    """Return the methods of all layer types of one model with one variant.

    If the variant changes nothing, `trained` and `evaluated` must be the same object.

    Raises:
        BackendError, ConfigError: a method cannot be built or drawn.
    """
    types = evaluated.layer_types
    if GAU in types:
        raise ConfigError("attention_config: gated attention units (gau) are not supported here; remove them")
    if added := types.keys() - trained.layer_types.keys():
        raise ConfigError(
            f"attention_config: the trained model has no layers of type {', '.join(added)}; set them for the model"
        )
    for key in ("pos_emb", "pos_emb_options", "rotary_pct", "rotary_frequencies"):
        if any(getattr(trained.layer_types[name], key) != getattr(position, key) for name, position in types.items()):
            raise ConfigError(f"{key}: part of the training; name the overlay after the model's file, not in --variant")
    return [
        ShownMethod(
            model if len(types) == 1 else f"{model}: {name}",
            variant,
            evaluated.model.layer_names.count(name),
            evaluated,
            position,
            trained,
            trained.layer_types[name],
            PositionEncoding(build_method(position, evaluated.model.with_heads(name))).eval(),
            length,
            name,
        )
        for name, position in types.items()
    ]


def _settings(shown: Sequence[ShownMethod]) -> Table:
    def chosen(choice: object) -> str:
        given = choice.model_dump() if hasattr(choice, "model_dump") else {}
        options = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        return options.removeprefix("rope_type ").removeprefix("type ") or str(choice or "-")

    rows = []
    for each in shown:
        position = each.position
        limits = position.sliding_window_width, position.attention_chunk_size
        seen = [limit for limit in limits if limit is not None]
        base = chosen(position.rotary_frequencies or f"{position.rotary_emb_base:g}")
        base += f", rotary_pct {position.rotary_pct:g}" if position.rotary_pct < 1 else ""
        texts = (
            f"{each.layers} of {each.config.model.num_layers}",
            chosen(position.pos_emb_options or position.pos_emb),
            base if each.method.rotary is not None else "-",
            chosen(position.rope_scaling),
            chosen(position.relative_positions),
            "-" if not seen else str(seen[0]),
            chosen(position.logit_scaling),
            position.forgetting_gate or ("sinks" if position.sink_logits else "-"),
        )
        rows.append(TableRow(each.label, tuple(TableCell(text, wide=True) for text in texts)))
    header = (
        "method",
        "layers",
        "pos_emb",
        "base or frequencies",
        "extension",
        "distance map",
        "window or chunk",
        "logit scaling",
    )
    return Table("methods", "Compared methods", (*header, "gate or sinks"), tuple(rows))


def _distances(length: int) -> list[int]:
    return np.unique(np.linspace(0, length - 1, POINTS).round().astype(int)).tolist()


def _bias(shown: ShownMethod) -> DistanceBias | None:
    bias, encoding = shown.method.bias, shown.encoding
    layer = shown.method.layer_bias() if encoding.bias is None else encoding.bias
    return layer.distance_bias() if layer is not None else bias.fixed


def _bias_at(bias: DistanceBias, distances: Sequence[int]) -> Tensor:
    """Return the bias [heads, distances] float64 for the query at the end of the input."""
    ascending = torch.tensor(distances, dtype=torch.float64)
    return bias_of_pairs(bias, ascending, ascending[-1])


def _trained(shown: ShownMethod) -> PositionMethod:
    return build_method(shown.trained_position, shown.trained.model.with_heads(shown.layer_type))


def _reach(method: PositionMethod, trained: bool, length: int) -> float:
    """Return the largest rotated distance between a query and a key in an input of `length` tokens."""
    keys = torch.arange(length, dtype=torch.float64)
    bands = method.trained_bands if trained else method.bands
    return float(rotated_distances(bands, keys[-1:], keys).abs().max())


Curves = dict[str, tuple[Sequence[float], Tensor]]
"""The x and y values of the curve of each label."""


def _scores(shown: ShownMethod) -> Curves:
    model, distances = shown.config.model, _distances(shown.length)
    sweep = DistanceSweep(shown.encoding, distances, shown.length, torch.device("cpu"))
    width = shown.method.head_dim
    drawn = torch.randn(PAIRS, 1, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    token, bias = drawn.expand(-1, model.num_attention_heads, -1), _bias(shown)
    factor = shown.method.layer_factor()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)  # the angles have random initial values
        offset = shown.method.layer_offsets()
    learned = (None if module is None else module().detach().double() for module in (factor, offset))
    swept = sweep.scores(token, token, bias, *learned)
    scores = swept.scores - (_bias_at(bias, distances) if bias is not None else 0.0)
    return {shown.variant: (distances, scores.mean(dim=(0, 1)).where(swept.visible, torch.tensor(math.nan)))}


def _wavelengths(shown: ShownMethod) -> Curves:
    trained = rotary_frequencies(PositionEncoding(_trained(shown)).eval(), shown.training_length)
    used = rotary_frequencies(shown.encoding, shown.length)
    by_label = {"in training": FULL_CIRCLE / trained, shown.variant: FULL_CIRCLE / used}
    return {label: (range(len(lengths)), lengths) for label, lengths in by_label.items()}


def _phases(shown: ShownMethod) -> Curves:
    given = shown.trained.general.training_positions  # an offset does not change distances
    wide = given is not None and given.type != "shifted"
    length = window_tokens(given.max, shown.training_length) if given and wide else shown.training_length
    assert length is not None  # the configuration check ensures it
    method = _trained(shown)
    trained = rotary_frequencies(PositionEncoding(method).eval(), shown.training_length)
    seen = trained * _reach(method, True, length)
    used = rotary_frequencies(shown.encoding, shown.length) * _reach(shown.method, False, shown.length)
    unseen = ((used.clamp(max=FULL_CIRCLE) - seen.clamp(max=FULL_CIRCLE)) / FULL_CIRCLE).clamp(min=0)
    return {shown.variant: (range(len(unseen)), unseen)}


def _biases(shown: ShownMethod) -> Curves:
    distances, bias = _distances(shown.length), _bias(shown)
    assert bias is not None
    values = _bias_at(bias, distances).detach()
    heads = sorted({round(head) for head in np.linspace(0, len(values) - 1, min(MOST_HEADS, len(values)))})
    return {f"head {head + 1}": (distances, values[head]) for head in heads}


def _logit_factors(shown: ShownMethod) -> Curves:
    method, positions = shown.method, torch.tensor(_distances(shown.length), dtype=torch.float64)
    factor = torch.ones_like(positions)
    if method.logit_scaling is not None:
        factor = factor * method.logit_scaling(positions, method.training_length)
    if method.initial_factor is not None:
        factor = factor * method.initial_factor
    if method.rotary is not None and shown.encoding.clex is None:
        factor = factor * method.rotary.multiplier(shown.length) ** 2
    return {shown.variant: (positions.tolist(), factor)}


@dataclass(frozen=True)
class Kind:
    """A figure of the page, with one panel per model.

    `curves` returns the curves of one method. `applies` returns False for a method that the figure leaves out. `panel`
    contains values for fields of `Panel`.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    curves: Callable[[ShownMethod], Curves]
    applies: Callable[[ShownMethod], bool] = lambda shown: True
    panel: Mapping[str, Any] = field(default_factory=dict)


def _panel(kind: Kind, group: Sequence[ShownMethod]) -> Panel:
    length = group[0].training_length
    curves: dict[str, Line] = {}
    for each in group:
        for label, (x, y) in kind.curves(each).items():
            look = look_of(each.method_name) if label == each.variant else None
            curves.setdefault(label, Line(label, tuple(map(float, x)), tuple(y.tolist()), look=look))
    lines = list(curves.values())
    marks: dict[float, str] = {} if kind.x_label == "frequency" else {length: "training length"}
    level = length if kind.y_label == "wavelength (tokens)" else None
    labels = kind.x_label, kind.y_label, group[0].model
    return Panel(tuple(lines), *labels, marks=marks, level=level, linear_x=True, **kind.panel)


def _rotary(shown: ShownMethod) -> bool:
    return shown.method.rotary is not None


KINDS = (
    Kind("scores", "Score against distance", "distance (tokens)", "score", _scores),
    Kind("wavelengths", "Wavelengths", "frequency", "wavelength (tokens)", _wavelengths, _rotary, {"log_y": True}),
    Kind("phases", "Phases never seen in training", "frequency", "share", _phases, _rotary, {"y_range": SHARES}),
    Kind("biases", "Bias by head", "distance (tokens)", "bias", _biases, lambda shown: _bias(shown) is not None),
    Kind("logits", "Logit factor", "position", "factor", _logit_factors),
)
"""The figures of the page, in order."""


def _layers(shown: Sequence[ShownMethod]) -> Figure:
    """Return a plot with one row of bars per model and one bar per layer, coloured by layer type."""
    models = {each.model.partition(":")[0]: each.config.model.layer_names for each in shown}
    types = list(dict.fromkeys(name for names in models.values() for name in names))

    def draw(canvas: Canvas, layout: Layout) -> None:
        axes = canvas.subplots()
        for kind, name in enumerate(types):
            bars = [
                (row, layer) for row, of in enumerate(models.values()) for layer, own in enumerate(of) if own == name
            ]
            rows, layers = zip(*bars, strict=True)
            axes.barh(
                rows, 0.9, left=[layer + 0.55 for layer in layers], height=0.7, color=numbered(kind).colour, label=name
            )
        axes.set_yticks(range(len(models)), [plot_text(model) for model in models])
        axes.set_ylim(len(models) - 0.5, -0.5)
        axes.set_xlabel("layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        canvas.legend(loc="outside lower center", ncols=4 if layout.columns > 1 else 2)

    return Figure("layers", CAPTIONS["layers"], "Type of every layer", draw, lambda layout: 1.4 + 0.4 * len(models))


@torch.no_grad()
def method_page(shown: Sequence[ShownMethod]) -> tuple[ReportDocument, dict[str, list[Panel]]]:
    """Return the page for one or more methods, and the panels of each figure by the figure's name."""
    sections, drawn = [Section("methods", "Methods", (ReportBlock(tables=(_settings(shown),)),))], {}
    models = dict.fromkeys(each.model for each in shown)
    for kind in KINDS:
        groups = [[each for each in shown if each.model == model and kind.applies(each)] for model in models]
        if not any(groups):
            continue
        drawn[kind.name] = [_panel(kind, group) for group in groups if group]
        figure = Figure(kind.name, CAPTIONS[kind.name], kind.title, *panels(drawn[kind.name]))
        sections.append(Section(kind.name, kind.title, (ReportBlock(figures=(figure,)),)))
    if any(len(set(each.config.model.layer_names)) > 1 for each in shown):
        drawn["layers"] = []
        sections.append(Section("layers", "Layers", (ReportBlock(figures=(_layers(shown),)),)))
    lengths = sorted({each.training_length for each in shown})
    summary = (
        f"Position methods with L = {', '.join(map(str, lengths))}, in an input of {shown[0].length} tokens. All"
        " numbers come from the functions that the model runs; learned weights have their initial values."
    )
    return ReportDocument("Position methods", summary, tuple(sections), measured=False), drawn


def write_page(document: ReportDocument, page: Path) -> list[Path]:
    """Write the page, and every figure as an SVG file next to it; return the written files."""
    page.parent.mkdir(parents=True, exist_ok=True)
    drawings = {figure.name: svgs(figure) for figure in document.figures()}
    page.write_text(html_page(document, drawings), encoding="utf-8")
    files = {page.with_name(f"{page.stem}_{name}.svg"): found[".svg"] for name, found in drawings.items()}
    for file, image in files.items():
        file.write_bytes(image)
    return [page, *files]
