"""The page of `megatron-coca stretch`: a sentence, a picture, a table, and the best method's configuration."""

import io
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from megatron_coca import methods
from megatron_coca.checkpoints.huggingface.rope import rope_parameters
from megatron_coca.config import Config
from megatron_coca.config.source import dump
from megatron_coca.evaluation.results import write_atomically
from megatron_coca.evaluation.stretch.measuring import FOILS
from megatron_coca.evaluation.stretch.plans import Plan, contrasts_text
from megatron_coca.evaluation.stretch.records import HOLDS, StretchResult
from megatron_coca.support.markdown_tables import format_table

MARKDOWN, PICTURE, OVERLAY = "stretch.md", "stretch.svg", "best.yml"


def write_page(result: StretchResult, configs: dict[str, Config], folder: Path, plan: Plan | None = None) -> str:
    """Write stretch.md, stretch.svg and best.yml to `folder`; return the text of the page.

    `configs` has the configuration of each method by name. The contrasts of `plan` are added.
    """
    best = result.ranked()[0]
    changes = best_yaml(result, best)
    write_atomically(folder / PICTURE, picture(result))
    write_atomically(folder / OVERLAY, changes.encode())
    text = "\n\n".join(
        [
            f"# {sentence(result)}",
            f"![Perplexity and margins by length]({PICTURE})",
            table(result),
            _notes(result),
            *(["## Contrasts", contrasts_text(result, plan)] if plan is not None and plan.contrasts else ()),
            "## The best method",
            f"For this project (`{OVERLAY}`):\n\n```yaml\n{changes}```",
            transformers_text(configs[best], result.trained),
            "## Time",
            _times(result),
            *_left_out(result),
        ]
    )
    write_atomically(folder / MARKDOWN, f"{text}\n".encode())
    return text


def sentence(result: StretchResult) -> str:
    """Say which method is best, how far it reaches, and what it costs at the training length."""
    best, plain = result.ranked()[0], result.methods[0].name
    reach, trained = result.reach(best), result.trained
    longest = max(result.lengths(), default=trained)
    if longest <= trained:
        return f"Nothing beyond the training length of {trained:,} tokens was measured; raise --budget"
    if reach <= trained:
        return f"No method extends this model beyond its training length of {trained:,} tokens (measured: {longest:,})"
    if best == plain:
        return f"The plain model holds at {reach:,} tokens, {reach / trained:.3g} times its training length, by itself"
    text = f"{best} extends this model to {reach:,} tokens, {reach / trained:.3g} times its training length"
    if (found := result.found(best, reach)) is not None:
        text += f": it finds {_hits(result, best, reach)} of {len(found.cases)} facts there"
        text += f" (plain: {_hits(result, plain, reach)})" if result.found(plain, reach) is not None else ""
    one, base = result.perplexity(best, trained), result.perplexity(plain, trained)
    if one is not None and base:
        text += f", and its perplexity at 1x is {abs(one / base - 1):.1%} {'higher' if one >= base else 'lower'}"
    return text


def _hits(result: StretchResult, method: str, length: int) -> int:
    found = result.found(method, length)
    return 0 if found is None else sum(case.found for case in found.cases)


def table(result: StretchResult) -> str:
    """Return one row for each method, best first: perplexity, and facts found with the mean margin, by length."""
    lengths = result.lengths()
    header = ["method", "holds to", *(f"perplexity {length:,}" for length in lengths)]
    header += [f"facts {length:,}" for length in lengths]
    rows = []
    for name in result.ranked():
        perplexities = [result.perplexity(name, length) for length in lengths]
        row = [name, f"{result.reach(name):,}", *("" if each is None else f"{each:.2f}" for each in perplexities)]
        rows.append([*row, *(_facts(result, name, length) for length in lengths)])
    rows += [[each.name, "not supported", *[""] * (len(header) - 2)] for each in result.methods if each.error]
    return format_table(header, rows)


def _facts(result: StretchResult, method: str, length: int) -> str:
    found = result.found(method, length)
    if found is None:
        return ""
    margins = [case.margin for case in found.cases]
    error = statistics.stdev(margins) / len(margins) ** 0.5 if len(margins) > 1 else 0.0
    return f"{_hits(result, method, length)}/{len(margins)}, {statistics.fmean(margins):+.2f} ± {error:.2f}"


def _notes(result: StretchResult) -> str:
    settings = result.settings
    prompts = "in the model's chat template" if settings.chat else "plain text"
    documents = max((len(loss.nlls) for loss in result.losses), default=0)
    errors = [f"{each.name}: {each.error}" for each in result.methods if each.error]
    return "\n".join(
        [
            f"- Perplexity is of the last {settings.scored:,} tokens of each document ({documents}), given the tokens "
            "before them within the length. All lengths score the same tokens.",
            f"- Facts are passkeys and needles in filler ({prompts}). A cell shows how many greedy decoding "
            "finds, and the mean margin with its standard error. The margin is the log-probability of the answer minus "
            f"that of the likeliest of {FOILS} foils, in nats.",
            f"- A method holds to a length if up to it its perplexity is at most {HOLDS:.2f} times that of the plain "
            "model at 1x, and the mean margin is above 0.",
            f"- Computed in {settings.environment.dtype} on {settings.environment.device}, torch "
            f"{settings.environment.torch}.",
            *(f"- Not supported: {error}" for error in errors),
        ]
    )


def best_yaml(result: StretchResult, method: str) -> str:
    """Return the YAML overlay that selects the method."""
    (record,) = (each for each in result.methods if each.name == method)
    changes = {key: _given(value) for key, value in record.overrides.items()}
    return f"# {method}, chosen by megatron-coca stretch\n{dump(changes)}"


def _given(value: object) -> object:
    """Return a section without the options that are not set."""
    return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value


def transformers_text(config: Config, length: int) -> str:
    """Return the `rope_parameters` of transformers for the method, or say that transformers has no such method."""
    position = config.position
    stock = position.extension.name in methods.names("rope_scaling", huggingface="stock")
    if not stock or position.relative_positions is not None or position.logit_scaling != "none":
        return (
            "transformers has no setting for this method. `megatron-coca export huggingface` or `--export` writes a "
            "folder with a modelling file that contains it."
        )
    parameters = json.dumps({"rope_parameters": rope_parameters(position, length)}, indent=2)
    return f"In the model's config.json for transformers:\n\n```json\n{parameters}\n```"


def _times(result: StretchResult) -> str:
    lengths = sorted({loss.length for loss in result.losses})
    header = ["seconds for each input", *(f"{length:,} tokens" for length in lengths), "facts (all prompts)"]
    rows = []
    for name in result.ranked():
        losses = [result.loss(name, length) for length in lengths]
        cells = ["" if loss is None else f"{loss.seconds / len(loss.nlls):.2f}" for loss in losses]
        facts = [each.seconds for each in result.retrieval if each.method == name]
        rows.append([name, *cells, f"{sum(facts):.1f}" if facts else ""])
    return format_table(header, rows)


def _left_out(result: StretchResult) -> list[str]:
    if not result.left_out:
        return []
    lines = "\n".join(f"- {line}" for line in result.left_out)
    return [
        "## Left out",
        f"These did not fit into the budget or the model. The same command continues:\n\n{lines}",
    ]


def picture(result: StretchResult) -> bytes:
    """Draw perplexity and mean margin by length, one line for each method, as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in result.ranked():
        for axes, values in ((left, result.perplexity), (right, result.margin)):
            points = [(length, value) for length in result.lengths() if (value := values(name, length)) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name)
    for axes, title in ((left, "perplexity"), (right, "margin of hidden facts, nats")):
        _finish(axes, title, result.lengths(), result.trained)
    left.set_yscale("log")
    right.axhline(0, color="grey", linewidth=0.8)
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _finish(axes, title: str, lengths: Sequence[int], trained: int) -> None:  # type: ignore[no-untyped-def]
    axes.set_title(title)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xlabel("tokens")
    axes.axvline(trained, color="grey", linestyle=":", linewidth=0.8)
