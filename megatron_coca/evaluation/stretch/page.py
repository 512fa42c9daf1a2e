"""The page of `megatron-coca stretch`: a sentence, a picture, a table, and the best method's configuration."""

import json
from pathlib import Path

from megatron_coca import methods
from megatron_coca.checkpoints.huggingface.rope import rope_parameters
from megatron_coca.config import Config
from megatron_coca.config.source import dump
from megatron_coca.evaluation.report.charts import images
from megatron_coca.evaluation.report.document import (
    Headline,
    ReportBlock,
    ReportDocument,
    Section,
    Table,
    html_page,
    markdown_table,
)
from megatron_coca.evaluation.results import write_atomically
from megatron_coca.evaluation.stretch import tables
from megatron_coca.evaluation.stretch.plans import Plan
from megatron_coca.evaluation.stretch.records import StretchResult
from megatron_coca.support.markdown_tables import escaped

MARKDOWN, HTML, PICTURE, OVERLAY = "stretch.md", "stretch.html", "stretch.svg", "best.yml"
UNKNOWN_FACTS = ": only its perplexity was measured there"


def write_page(result: StretchResult, configs: dict[str, Config], folder: Path, plan: Plan | None = None) -> str:
    """Write stretch.html, stretch.md, stretch.svg and best.yml to `folder`; return the text of stretch.md.

    `configs` has the configuration of each method by name. The contrasts of `plan` are added.
    """
    best = result.ranked()[0]
    changes = best_yaml(result, best)
    document = _document(result, configs[best], plan, changes)
    assert document.headline is not None and document.headline.figure is not None
    drawn = images(document.headline.figure)
    write_atomically(folder / PICTURE, drawn[".svg"])
    write_atomically(folder / OVERLAY, changes.encode())
    write_atomically(folder / HTML, html_page(document, {tables.PICTURE: drawn}).encode())
    text = _markdown(document)
    write_atomically(folder / MARKDOWN, f"{text}\n".encode())
    return text


def _document(result: StretchResult, config: Config, plan: Plan | None, changes: str) -> ReportDocument:
    """Return the content of the page; `changes` is the YAML of the best method, which has the configuration."""
    figure = tables.figure(result)
    own = ReportBlock(text=(f"For this project ({OVERLAY}):",), code=changes.rstrip())
    theirs, parameters = for_transformers(config, result.trained)
    sections = [Section("best", "The best method", (own, ReportBlock(text=(theirs,), code=parameters)))]
    if plan is not None and plan.contrasts:
        block = ReportBlock(tables=(tables.contrast_table(result, plan),))
        sections.insert(0, Section("contrasts", "Contrasts", (block,)))
    times = ReportBlock(tables=(tables.time_table(result),), figures=(figure,))
    sections.append(Section("time", "Time", (times,)))
    if result.left_out:
        said = "These did not fit into the budget or the model. The same command continues:"
        sections.append(Section("left-out", "Left out", (ReportBlock(text=(said, *result.left_out)),)))
    top = Headline(sentence(result), "", tables.main_table(result), figure)
    return ReportDocument(f"Stretching {_name(result)}", "", tuple(sections), measured=False, headline=top)


def _name(result: StretchResult) -> str:
    return Path(result.settings.checkpoint.path.removeprefix("hf://")).name


def _markdown(document: ReportDocument) -> str:
    """Return stretch.md, which begins with the sentence."""
    top = document.headline
    assert top is not None and top.figure is not None
    parts = [f"# {escaped(top.sentence)}", f"![{escaped(top.figure.alt)}]({PICTURE})", _table(top.table)]
    for section in document.sections:
        parts.append(f"## {section.title}")
        for block in section.blocks:
            parts += map(_table, block.tables)
            first, *rest = block.text or ("",)
            parts += [escaped(first), "\n".join(f"- {escaped(line)}" for line in rest)]
            parts.append(f"```\n{block.code}\n```" if block.code else "")
    return "\n\n".join(filter(None, parts))


def _table(table: Table) -> str:
    text, *below = markdown_table(table, escaped, escaped).split("\n\n")
    return "\n\n".join(filter(None, (text, "\n".join(f"- {line}" for line in below))))


def sentence(result: StretchResult) -> str:
    """Say which method is best, how far it reaches, and its cost at the training length."""
    best, plain = result.ranked()[0], result.methods[0].name
    reach, trained = result.reach(best), result.trained
    longest = max(result.lengths(), default=trained)
    if longest <= trained:
        reason = "; the end of this page says why" if result.left_out else ""
        return f"Nothing beyond the training length of {trained:,} tokens was measured{reason}"
    if reach <= trained:
        return f"No method extends this model beyond its training length of {trained:,} tokens (measured: {longest:,})"
    if best == plain:
        text = f"The plain model holds at {reach:,} tokens, {reach / trained:.3g} times its training length, by itself"
        return text + ("" if result.found(plain, reach) is not None else UNKNOWN_FACTS)
    text = f"{best} extends this model to {reach:,} tokens, {reach / trained:.3g} times its training length"
    if (found := result.found(best, reach)) is not None:
        text += f": it finds {tables.hits(result, best, reach)} of {len(found.cases)} facts there"
        text += f" (plain: {tables.hits(result, plain, reach)})" if result.found(plain, reach) is not None else ""
    else:
        text += UNKNOWN_FACTS
    one, base = result.perplexity(best, trained), result.perplexity(plain, trained)
    if one is not None and base:
        text += f", and its perplexity at 1x is {abs(one / base - 1):.1%} {'higher' if one >= base else 'lower'}"
    return text


def best_yaml(result: StretchResult, method: str) -> str:
    """Return the YAML overlay that selects the method."""
    (record,) = (each for each in result.methods if each.name == method)
    changes = {key: _given(value) for key, value in record.overrides.items()}
    return f"# {method}, chosen by megatron-coca stretch\n{dump(changes)}"


def _given(value: object) -> object:
    """Return a section without the options that are not set."""
    return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value


def for_transformers(config: Config, length: int) -> tuple[str, str]:
    """Return a sentence and the `rope_parameters` of transformers, which are empty if it has no such method."""
    position = config.position
    stock = position.extension.name in methods.names("rope_scaling", huggingface="stock")
    if not stock or position.relative_positions is not None or position.logit_scaling != "none":
        return (
            "transformers has no setting for this method. `megatron-coca export huggingface` or `--export` writes a "
            "folder with a modelling file that contains it."
        ), ""
    parameters = json.dumps({"rope_parameters": rope_parameters(position, length)}, indent=2)
    return "In the model's config.json for transformers:", parameters
