"""The page of `megatron-coca stretch`. It has a sentence, a picture, tables and the chosen method's configuration."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_coca import methods
from megatron_coca.checkpoints.huggingface.rope import rope_parameters
from megatron_coca.config import Config
from megatron_coca.config.source import dump
from megatron_coca.evaluation.report.document import (
    Headline,
    ReportBlock,
    ReportDocument,
    Section,
    Table,
    html_page,
    markdown_table,
)
from megatron_coca.evaluation.report.plots.figures import svgs
from megatron_coca.evaluation.results import write_atomically
from megatron_coca.evaluation.stretch import tables
from megatron_coca.evaluation.stretch.decision import FEWEST, MOST_NEEDED, POWER, Decision, decide
from megatron_coca.evaluation.stretch.plans import Plan
from megatron_coca.evaluation.stretch.records import StretchResult
from megatron_coca.support.console import duration
from megatron_coca.support.markdown_tables import escaped

MARKDOWN, HTML, PICTURE, OVERLAY = "stretch.md", "stretch.html", "stretch.svg", "best.yml"
ORDER = "no extension first, then the method that sets the fewest config keys, then the order of --help"
"""The order of simplicity (`choices.simplicity`)."""


def write_page(
    result: StretchResult,
    configs: Mapping[str, Config],
    folder: Path,
    plan: Plan | None = None,
    more: Sequence[Section] = (),
) -> str:
    """Write stretch.html, stretch.md, stretch.svg and best.yml to `folder`; return the text of stretch.md.

    `configs` has the configuration of each method by its name. `more` are sections that are placed before the usual
    ones. The contrasts of `plan` are added.
    """
    decision = decide(result)
    changes = best_yaml(result, decision)
    document = _document(result, decision, configs[decision.chosen], plan, changes, more)
    assert document.headline is not None and document.headline.figure is not None
    drawn = svgs(document.headline.figure, "light")  # a page needs no PDF or PNG
    write_atomically(folder / PICTURE, drawn[".svg"])
    write_atomically(folder / OVERLAY, changes.encode())
    write_atomically(folder / HTML, html_page(document, {tables.PICTURE: drawn}).encode())
    text = _markdown(document)
    write_atomically(folder / MARKDOWN, f"{text}\n".encode())
    return text


def _document(
    result: StretchResult,
    decision: Decision,
    config: Config,
    plan: Plan | None,
    changes: str,
    more: Sequence[Section],
) -> ReportDocument:
    """Return the content of the page. `config` is that of the chosen method. `changes` is the YAML that selects it."""
    figure = tables.figure(result)
    own = ReportBlock(
        text=(f"{decision.chosen}, {reason(decision)}, for this project ({OVERLAY}):",), code=changes.rstrip()
    )
    theirs, parameters = for_transformers(config, result.trained)
    sections = [*more]
    if plan is not None and plan.contrasts:
        sections.append(
            Section("contrasts", "Contrasts", (ReportBlock(tables=(tables.contrast_table(result, plan),)),))
        )
    if decision.compared:
        compared = ReportBlock(tables=(tables.comparison_table(result, decision),))
        title = f"{decision.leader} and the other methods at {decision.length:,} tokens"
        sections.append(Section("comparison", title, (compared,)))
    chosen = ReportBlock(text=(theirs,), code=parameters)
    sections.append(Section("best", "The chosen method", (own, chosen)))
    if any(result.facts(name, length) for name in result.supported for length in result.lengths()):
        sections.append(Section("facts", "Hidden facts", (ReportBlock(tables=(tables.fact_table(result),)),)))
    times = ReportBlock(tables=(tables.time_table(result),), figures=(figure,))
    sections.append(Section("time", "Time", (times,)))
    if result.left_out:
        said = "These did not fit into the budget or the model. The same command continues:"
        sections.append(Section("left-out", "Left out", (ReportBlock(text=(said, *result.left_out)),)))
    basis = " ".join(filter(None, (result.too_short, *basis_of(result, decision))))
    top = Headline(sentence(result, decision), basis, tables.main_table(result), figure)
    return ReportDocument(f"Stretching {_name(result)}", "", tuple(sections), measured=False, headline=top)


def _name(result: StretchResult) -> str:
    return Path(result.header.checkpoint.path.removeprefix("hf://")).name


def _markdown(document: ReportDocument) -> str:
    """Return the text of stretch.md. Its title is the sentence that says which method is best."""
    top = document.headline
    assert top is not None and top.figure is not None
    parts = [
        f"# {escaped(top.sentence)}",
        escaped(top.basis),
        f"![{escaped(top.figure.alt)}]({PICTURE})",
        _table(top.table),
    ]
    for section in document.sections:
        parts.append(f"## {escaped(section.title)}")
        for block in section.blocks:
            parts += map(_table, block.tables)
            first, *rest = block.text or ("",)
            parts += [escaped(first), "\n".join(f"- {escaped(line)}" for line in rest)]
            language = "json" if block.code.startswith("{") else "yaml"
            parts.append(f"```{language}\n{block.code}\n```" if block.code else "")
    return "\n\n".join(filter(None, parts))


def _table(table: Table) -> str:
    text, *below = markdown_table(table, escaped, escaped).split("\n\n")
    return "\n\n".join(filter(None, (text, "\n".join(f"- {line}" for line in below))))


def sentence(result: StretchResult, decision: Decision) -> str:
    """Return the sentence that says which method extends the model and how far, or which methods are undecided."""
    trained, reach, leader = result.trained, decision.length, decision.leader
    longest = max(result.lengths(), default=trained)
    if longest <= trained:
        why = "; the end of this page says why" if result.left_out else ""
        return f"Nothing beyond the training length of {trained:,} tokens was measured{why}"
    if reach <= trained:
        return f"No method extends this model beyond its training length of {trained:,} tokens (measured: {longest:,})"
    times = f"{reach:,} tokens, {reach / trained:.3g} times its training length"
    found = _found(result, decision)
    if len(decision.undecided) > 1:
        return f"Undecided between {_listed(decision.undecided)} at {times}: {found}"
    if leader == result.plain:
        return f"{leader} holds at {times}, without an extension: {found}"
    return f"{leader} extends this model to {times}: {found}, and {_cost(result, leader)}"


def _found(result: StretchResult, decision: Decision) -> str:
    """Return a clause that says how many facts the undecided methods find."""
    names, length = decision.undecided, decision.length
    one = len(names) == 1
    if not result.facts(decision.leader, length):
        return f"only {'its' if one else 'their'} perplexity was measured there"
    counts = [len(result.facts(name, length)) for name in names]
    found = [tables.hits(result, name, length) for name in names]
    if len(set(counts)) > 1:
        shown = _listed([f"{number} of {count}" for number, count in zip(found, counts, strict=True)])
    else:
        shown = f"{_listed(list(map(str, found)))} of {counts[0]}"
    text = f"{'it finds' if one else 'they find'} {shown} {'fact' if max(counts) == 1 else 'facts'} there"
    if result.plain not in names and result.facts(result.plain, length):
        text += f" ({result.plain}: {tables.hits(result, result.plain, length)})"
    return text


def _cost(result: StretchResult, method: str) -> str:
    """Return a clause that compares the perplexity at the training length with that of the plain model."""
    one, base = result.perplexity(method, result.trained), result.perplexity(result.plain, result.trained)
    assert one is not None and base is not None, "a method that holds has a perplexity at 1x"
    change = f"{abs(one / base - 1):.1%} {'higher' if one >= base else 'lower'} than"
    return f"its perplexity at {result.trained:,} tokens is {change} that of {result.plain}"


def basis_of(result: StretchResult, decision: Decision) -> list[str]:
    """Return sentences that say what separates the methods, how many facts would decide, and which method is chosen."""
    if decision.length <= result.trained:
        return []
    said = []
    for by, what in (
        ("facts found", "find significantly fewer facts"),
        ("margin", "have significantly lower margins"),
    ):
        if names := [each.method for each in decision.compared if each.by == by]:
            said.append(f"Compared with {decision.leader}, these {what} there: {_listed(names)}.")
    if decision.unmeasured:
        said.append(f"Not measured there: {_listed(decision.unmeasured)}.")
    if len(decision.undecided) == 1:
        return said
    if decision.compared:
        said += _would_decide(result, decision)
    said.append(f"{OVERLAY}, --export and --chat use {decision.chosen}, {reason(decision)}.")
    if decision.chosen != result.plain:
        cost = _cost(result, decision.chosen)
        said.append(f"{cost[0].upper()}{cost[1:]}.")
    return said


def _would_decide(result: StretchResult, decision: Decision) -> list[str]:
    """Return sentences that say how many facts would decide between the undecided methods, and in what time."""
    open_ones = {each.method: each.facts for each in decision.compared if not each.by}
    fewest = min(open_ones.values())
    if fewest < FEWEST:
        measured = f"{fewest} was" if fewest == 1 else f"{fewest} were"
        seconds = _time(result, (decision.leader, *open_ones), decision.length, FEWEST)
        return [f"Methods are compared from {FEWEST} facts on, and {measured} measured{seconds}."]
    said = []
    known = {each.method: each.needed for each in decision.compared if each.needed is not None}
    if near := [name for name, number in known.items() if number > MOST_NEEDED]:
        said.append(
            f"{_listed(near)} differ{'s' if len(near) == 1 else ''} so little from {decision.leader} that more than "
            f"{MOST_NEEDED:,} facts of each would be needed to decide."
        )
    if others := {name: round(number) for name, number in known.items() if number <= MOST_NEEDED}:
        number = max(others.values())
        seconds = _time(result, (decision.leader, *others), decision.length, number)
        about = f" about {_listed(list(others))}" if near else ""
        said.append(f"About {number:,} facts of each would decide{about} (with a power of {POWER:.0%}){seconds}.")
    return said


def _time(result: StretchResult, methods: Sequence[str], length: int, count: int) -> str:
    """Return a clause that says how much longer it would take to measure `count` facts of each method."""
    seconds = 0.0
    for name in methods:
        seconds += max(0, count - result.cases(name, length)) * (result.fact_seconds(name, length) or 0.0)
    return f"; they would take about {duration(math.ceil(seconds))} more" if seconds else ""


def reason(decision: Decision) -> str:
    """Return why the method is chosen. On the page, these words follow the name of the method and a comma."""
    if not decision.leader:
        return "because no method holds"
    if len(decision.undecided) == 1:
        return "the best method"
    return f"the simplest of the undecided methods that hold ({ORDER})"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def best_yaml(result: StretchResult, decision: Decision) -> str:
    """Return the YAML overlay that selects the chosen method."""
    changes = {key: _given(value) for key, value in result.results[decision.chosen].overrides.items()}
    others = [name for name in decision.undecided if name != decision.chosen]
    doubt = f"; undecided between it and {_listed(others)}" if others else ""
    return f"# {decision.chosen}, chosen by megatron-coca stretch{doubt}\n{dump(changes)}"


def _given(value: object) -> object:
    """Return a value of a config key. From a section, omit the keys without a value."""
    return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value


def for_transformers(config: Config, length: int) -> tuple[str, str]:
    """Return a sentence and the `rope_parameters` of transformers, which are "" if transformers lacks the method."""
    position = config.position
    stock = position.extension.name in methods.names("rope_scaling", huggingface="stock")
    if not stock or position.relative_positions is not None or position.logit_scaling != "none":
        return (
            "transformers has no setting for this method. The option --export, or the command megatron-coca export "
            "huggingface, writes a folder with a modelling file that contains it."
        ), ""
    parameters = json.dumps({"rope_parameters": rope_parameters(position, length)}, indent=2)
    return "In the model's config.json for transformers:", parameters
