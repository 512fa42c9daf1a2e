"""One page that shows what position methods do, side by side: scores, wavelengths, phases, biases, logits, layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from megatron_coca.attention.build import build_method
from megatron_coca.attention.inputs import DistanceBias, bias_of_pairs
from megatron_coca.attention.method import PositionEncoding, PositionMethod
from megatron_coca.config import Config, PositionConfig
from megatron_coca.config.model import GAU
from megatron_coca.config.training import window_tokens
from megatron_coca.evaluation.analysis.distance_sweep import DistanceSweep, rotary_frequencies, rotated_distances
from megatron_coca.evaluation.options import plot_text
from megatron_coca.evaluation.report.charts import (
    LIGHT,
    STYLES,
    Figure,
    Line,
    Panel,
    panels,
    size_with_legend,
    svg,
)
from megatron_coca.evaluation.report.document import (
    ReportBlock,
    ReportDocument,
    Section,
    Table,
    TableCell,
    TableRow,
    html_page,
)

POINTS = 400
"""Distances at which scores and biases are drawn."""
PAIRS = 64
"""Random queries over whose scores the mean is taken, so that no single one shapes the curve."""
MOST_HEADS = 8
"""Heads whose bias is drawn; of more, as many at equal steps."""
FULL_CIRCLE = 2 * math.pi


@dataclass(frozen=True)
class ShownMethod:
    """The method of one type of layers in evaluation.

    Attributes:
        model: its label, with the type of layers if there are several.
        variant: the label of what evaluation changes.
        layers: how many have this method.
        config, position: as evaluated; `position` has the keys of the type of layers.
        trained, trained_position: the same in training, without the variant.
        encoding: computes the tables, with initial weights where it has any.
        length: of the input that is shown, in tokens.
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

    @property
    def label(self) -> str:
        return f"{self.model} + {self.variant}" if self.config is not self.trained else self.model

    @property
    def method(self) -> PositionMethod:
        return self.encoding.method

    @property
    def training_length(self) -> int:
        return self.trained.model.seq_length


@dataclass(frozen=True)
class Drawing:
    """A section of the page: its title, its figure, and the numbers in it."""

    title: str
    figure: Figure
    panels: tuple[Panel, ...] = ()


def shown_methods(model: str, variant: str, trained: Config, evaluated: Config, length: int) -> list[ShownMethod]:
    """The methods of all types of layers of one model, whose variant may change what it was trained with.

    A variant that changes nothing has the same configuration twice.

    Raises:
        BackendError, ValueError: a method cannot be built.
    """
    types = evaluated.layer_types
    if GAU in types:
        raise ValueError("attention_config: gated attention units (gau) are not drawn; leave them out")
    return [
        ShownMethod(
            model if len(types) == 1 else f"{model}: {name}",
            variant,
            evaluated.model.layer_names.count(name),
            evaluated,
            position,
            trained,
            trained.layer_types[name],
            PositionEncoding(build_method(position, evaluated.model)).eval(),
            length,
        )
        for name, position in types.items()
    ]


@torch.no_grad()
def method_page(shown: Sequence[ShownMethod]) -> tuple[ReportDocument, dict[str, list[Panel]]]:
    """The page of at least one method, and the panels of its figures by name."""
    rotary = [each for each in shown if each.method.rotary is not None]
    biased = [group[0] for group in _by_model(shown) if _bias(group[0]) is not None]
    drawn = [
        _scores(shown),
        *([_wavelengths(rotary), _phases(rotary)] if rotary else []),
        *([_biases(biased)] if biased else []),
        _logit_factors(shown),
        _layers(list({id(each.config): each for each in shown}.values())),
    ]
    sections = [Section("methods", "Methods", (ReportBlock(tables=(_settings(shown),)),))]
    sections += [Section(each.figure.name, each.title, (ReportBlock(figures=(each.figure,)),)) for each in drawn]
    lengths = sorted({each.training_length for each in shown})
    summary = (
        f"Position methods with L = {', '.join(map(str, lengths))}, in an input of {shown[0].length} tokens. All"
        " numbers come from the functions that the model runs; learned weights have their initial values."
    )
    document = ReportDocument("Position methods", summary, tuple(sections), measured=False)
    return document, {each.figure.name: list(each.panels) for each in drawn}


def _settings(shown: Sequence[ShownMethod]) -> Table:
    def chosen(choice: object) -> str:
        given = choice.model_dump() if hasattr(choice, "model_dump") else {}
        options = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        return options.removeprefix("rope_type ").removeprefix("type ") or str(choice or "-")

    rows = []
    for each in shown:
        position = each.position
        texts = (
            f"{each.layers} of {each.config.model.num_layers}",
            position.pos_emb,
            f"{position.rotary_emb_base:g}" if each.method.rotary is not None else "-",
            chosen(position.rope_scaling),
            chosen(position.relative_positions),
            str(position.sliding_window_width or position.attention_chunk_size or "-"),
            chosen(position.logit_scaling),
            chosen(position.forgetting_gate),
        )
        rows.append(TableRow(each.label, tuple(TableCell(text, wide=True) for text in texts)))
    header = (
        "method",
        "layers",
        "pos_emb",
        "base",
        "extension",
        "distance map",
        "window or chunk",
        "logit scaling",
        "gate",
    )
    return Table("methods", "What was compared", header, tuple(rows))


def _distances(length: int) -> list[int]:
    return np.unique(np.linspace(0, length - 1, POINTS).round().astype(int)).tolist()


def _bias(shown: ShownMethod) -> DistanceBias | None:
    bias, encoding = shown.method.bias, shown.encoding
    layer = shown.method.layer_bias() if encoding.bias is None else encoding.bias
    return layer.distance_bias() if layer is not None else bias.fixed


def _bias_at(bias: DistanceBias, distances: list[int]) -> Tensor:
    """[heads, distances] float64, for the query at the end of the input."""
    ascending = torch.tensor(distances, dtype=torch.float64)
    return bias_of_pairs(bias, ascending, ascending[-1])


def _mark(shown: Sequence[ShownMethod]) -> dict[float, str]:
    return {each.training_length: "training length" for each in shown}


def _drawing(title: str, name: str, caption: str, drawn: Sequence[Panel]) -> Drawing:
    """One panel, or several in two columns."""
    columns = min(2, len(drawn))
    size = size_with_legend([line.label for line in drawn[0].lines] + [*drawn[0].marks.values()])
    if len(drawn) > 1:
        size = (9.2, 1.0 + 3.0 * math.ceil(len(drawn) / columns))
    return Drawing(title, Figure(name, caption, title, panels(drawn, columns), size), tuple(drawn))


def _by_model(shown: Sequence[ShownMethod]) -> list[list[ShownMethod]]:
    return [[each for each in shown if each.model == model] for model in dict.fromkeys(each.model for each in shown)]


def _scores(shown: Sequence[ShownMethod]) -> Drawing:
    def line(each: ShownMethod) -> Line:
        model, distances = each.config.model, _distances(each.length)
        sweep = DistanceSweep(each.encoding, distances, each.length, torch.device("cpu"))
        drawn = torch.randn(PAIRS, 1, model.head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        token, bias = drawn.expand(-1, model.num_attention_heads, -1), _bias(each)
        swept = sweep.scores(token, token, bias)
        scores = swept.scores - (_bias_at(bias, distances) if bias is not None else 0.0)
        scores = scores.mean(dim=(0, 1)).where(swept.visible, torch.tensor(math.nan))
        return Line(each.variant, tuple(map(float, distances)), tuple(scores.tolist()))

    drawn = [
        Panel(tuple(map(line, group)), "distance (tokens)", "score", group[0].model, marks=_mark(group), linear_x=True)
        for group in _by_model(shown)
    ]
    caption = (
        f"The score of a query, at the end of the input, with a key of the same vector: the mean over {PAIRS} normal"
        " vectors and all heads, without bias and gates. No line where the method hides the key. For CoCA the key's"
        " vector is that of the T projection."
    )
    return _drawing("Score against distance", "scores", caption, drawn)


def _trained_frequencies(shown: ShownMethod) -> Tensor:
    method = build_method(shown.trained_position, shown.trained.model)
    assert method.rotary is not None
    return rotary_frequencies(PositionEncoding(method).eval(), shown.training_length)


def _wavelengths(shown: Sequence[ShownMethod]) -> Drawing:
    def line(label: str, frequencies: Tensor) -> Line:
        lengths = (FULL_CIRCLE / frequencies).tolist()
        return Line(label, tuple(map(float, range(len(lengths)))), tuple(lengths))

    def panel(group: Sequence[ShownMethod]) -> Panel:
        trained = line("in training", _trained_frequencies(group[0]))
        used = [line(each.variant, rotary_frequencies(each.encoding, each.length)) for each in group]
        level = group[0].training_length
        return Panel(
            (trained, *used), "frequency", "wavelength (tokens)", group[0].model, True, level=level, linear_x=True
        )

    caption = (
        "Tokens in one rotation of every frequency; the dotted line is the training length, above which training"
        " shows only a part of the circle. Frequencies of 0 are left out."
    )
    return _drawing("Wavelengths", "wavelengths", caption, [*map(panel, _by_model(shown))])


def _reach(method: PositionMethod, trained: bool, length: int) -> float:
    """The largest distance by which a query and a key are rotated in an input of `length` tokens."""
    keys = torch.arange(length, dtype=torch.float64)
    bands = method.trained_bands if trained else method.bands
    return float(rotated_distances(bands, keys[-1:], keys).abs().max())


def _phases(shown: Sequence[ShownMethod]) -> Drawing:
    def line(each: ShownMethod) -> Line:
        given = each.trained.general.training_positions  # an offset alone changes no distance
        wide = given is not None and given.type != "shifted"
        length = window_tokens(given.max, each.training_length) if given and wide else each.training_length
        assert length is not None  # checked with the configuration
        method = build_method(each.trained_position, each.trained.model)
        seen = _trained_frequencies(each) * _reach(method, True, length)
        used = rotary_frequencies(each.encoding, each.length) * _reach(each.method, False, each.length)
        unseen = ((used.clamp(max=FULL_CIRCLE) - seen.clamp(max=FULL_CIRCLE)) / FULL_CIRCLE).clamp(min=0)
        return Line(each.variant, tuple(map(float, range(len(unseen)))), tuple(unseen.tolist()))

    drawn = [
        Panel(tuple(map(line, group)), "frequency", "share", group[0].model, y_range=(-0.03, 1.03), linear_x=True)
        for group in _by_model(shown)
    ]
    caption = (
        "The share of the circle that the rotations of a frequency reach in this input and never reached in training;"
        " 0 where every phase was seen."
    )
    return _drawing("Phases that training never showed", "phases", caption, drawn)


def _biases(shown: Sequence[ShownMethod]) -> Drawing:
    def panel(each: ShownMethod) -> Panel:
        distances, bias = _distances(each.length), _bias(each)
        assert bias is not None
        values = _bias_at(bias, distances).detach()
        heads = sorted({round(head) for head in np.linspace(0, len(values) - 1, min(MOST_HEADS, len(values)))})
        x = tuple(map(float, distances))
        lines = tuple(Line(f"head {head + 1}", x, tuple(values[head].tolist())) for head in heads)
        return Panel(lines, "distance (tokens)", "bias", each.model, marks=_mark([each]), linear_x=True)

    caption = f"What is added to the scores of a query at the end of the input, of at most {MOST_HEADS} heads."
    return _drawing("Bias by head", "biases", caption, [panel(each) for each in shown])


def _logit_factors(shown: Sequence[ShownMethod]) -> Drawing:
    def line(each: ShownMethod) -> Line:
        method, positions = each.method, torch.tensor(_distances(each.length), dtype=torch.float64)
        factor = torch.ones_like(positions)
        if method.logit_scaling is not None:
            factor = factor * method.logit_scaling(positions, method.training_length)
        if method.rotary is not None and each.encoding.clex is None:
            factor = factor * method.rotary.multiplier(each.length) ** 2
        return Line(each.variant, tuple(positions.tolist()), tuple(factor.tolist()))

    drawn = [
        Panel(tuple(map(line, group)), "position", "factor", group[0].model, marks=_mark(group), linear_x=True)
        for group in _by_model(shown)
    ]
    caption = "What the scores of a query are multiplied by: logit scaling, and the temperature of the extension."
    return _drawing("Logit factor", "logits", caption, drawn)


def _layers(shown: Sequence[ShownMethod]) -> Drawing:
    types = list(dict.fromkeys(name for each in shown for name in each.config.model.layer_names))
    colours = {name: LIGHT[index % len(LIGHT)] for index, name in enumerate(types)}

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for row, each in enumerate(shown):
            for layer, name in enumerate(each.config.model.layer_names, 1):
                axes.barh(row, 0.9, left=layer - 0.45, height=0.7, color=colours[name])
        axes.set_yticks(range(len(shown)), [plot_text(each.label.partition(":")[0]) for each in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlabel("layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
        canvas.legend(handles=handles, loc="outside lower center", ncols=4)

    figure = Figure("layers", "The type of every layer.", "Type of every layer", draw, (9.0, 1.6 + 0.4 * len(shown)))
    return Drawing("Layers", figure)


def write_page(document: ReportDocument, page: Path) -> list[Path]:
    """Write the page, and every figure beside it as SVG; return the files."""
    page.parent.mkdir(parents=True, exist_ok=True)
    drawings = {figure.name: {style: svg(figure, style) for style in STYLES} for figure in document.figures()}
    page.write_text(html_page(document, drawings))
    files = {page.with_name(f"{page.stem}_{name}.svg"): images["print"] for name, images in drawings.items()}
    for file, image in files.items():
        file.write_bytes(image)
    return [page, *files]
