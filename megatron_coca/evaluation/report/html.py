"""The report as one page that needs nothing else: no network, no scripts, images inside."""

import base64
from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby

from megatron_coca.evaluation.report import charts
from megatron_coca.evaluation.report.document import Entry, Figure, Line, ReportBlock, ReportDocument, Section, Table

CSS = """
:root {
  color-scheme: light dark;
  --ground: #ffffff; --raised: #f6f7f9; --ink: #1b1f24; --soft: #59626e; --rule: #d9dee5;
  --accent: #0b5cad; --best: #0a6b4b; --published: #f1f5fa; --warn: #9a4b00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171b; --raised: #1c2026; --ink: #e4e7ec; --soft: #9aa4b1; --rule: #343b45;
    --accent: #7cb8ff; --best: #5fd0a5; --published: #1b2430; --warn: #f0a860;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-padding-top: 1rem; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "DejaVu Sans", sans-serif;
}
main, header, footer { max-width: 62rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.5rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.01em; text-wrap: balance; }
h2 { font-size: 1.35rem; line-height: 1.25; margin: 3rem 0 .75rem; padding-top: 1.25rem; border-top: 1px solid var(--rule); }
h3 { font-size: 1.05rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere; }
p { margin: .5rem 0 .9rem; max-width: 46rem; overflow-wrap: break-word; }
.summary, figcaption, .notes, .how { color: var(--soft); }
.how { font-size: .88rem; }
nav ul { display: flex; flex-wrap: wrap; gap: .35rem .6rem; list-style: none; margin: 1.1rem 0 0; padding: 0; }
nav a {
  display: inline-block; padding: .2rem .7rem; border: 1px solid var(--rule); border-radius: 999px;
  color: var(--accent); text-decoration: none; font-size: .9rem;
}
nav a:hover, nav a:focus-visible { border-color: var(--accent); }
.scroll {
  overflow-x: auto; margin: 1rem 0 .5rem; border: 1px solid var(--rule); border-radius: .5rem;
  width: fit-content; max-width: 100%;
}
.scroll:focus-visible, a:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
table { border-collapse: separate; border-spacing: 0; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption {
  caption-side: top; text-align: left; padding: .65rem .8rem; font-weight: 600; background: var(--raised);
  border-bottom: 1px solid var(--rule);
}
caption span { position: sticky; left: .8rem; display: inline-block; max-width: min(58rem, calc(100vw - 4.2rem)); }
th, td { padding: .42rem .8rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
tbody:last-child tr:last-child > * { border-bottom: 0; }
thead th { font-weight: 600; color: var(--soft); background: var(--raised); vertical-align: bottom; }
th:first-child {
  position: sticky; left: 0; z-index: 1; text-align: left; background: var(--ground); font-weight: 500;
  white-space: normal; min-width: 9rem; max-width: min(20rem, 44vw); overflow-wrap: break-word;
  box-shadow: inset -1px 0 var(--rule);
}
thead th:first-child { background: var(--raised); }
td small, th small { display: block; color: var(--soft); font-size: .78rem; font-weight: 400; }
td.best { font-weight: 700; color: var(--best); }
td.absent { color: var(--warn); font-size: .84rem; }
td.text, table:has(td.text) thead th { text-align: left; }
tbody.published th, tbody.published td { background: var(--published); }
tbody.published th.group {
  position: static; font-size: .82rem; font-weight: 600; color: var(--soft); box-shadow: none; max-width: none;
}
th.group span { position: sticky; left: .8rem; display: inline-block; max-width: calc(100vw - 4.2rem); }
sup a { color: var(--accent); text-decoration: none; padding: 0 .1rem; }
.notes { font-size: .84rem; margin: .3rem 0 1.6rem; padding: 0; list-style: none; max-width: 52rem; }
.notes li { margin: .2rem 0; overflow-wrap: anywhere; }
figure { margin: 1.25rem 0 1.75rem; }
figure img { display: block; width: 100%; max-width: 44rem; height: auto; }
figcaption { font-size: .88rem; max-width: 46rem; margin-top: .4rem; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 0 1.75rem; }
.figures.single { display: block; }
footer { color: var(--soft); font-size: .85rem; padding-top: 2rem; padding-bottom: 3rem; }
@media (max-width: 40rem) {
  main, header, footer { padding-left: .9rem; padding-right: .9rem; }
  header { padding-top: 1.4rem; }
  h1 { font-size: 1.45rem; }
  h2 { font-size: 1.2rem; margin-top: 2.2rem; }
  th, td { padding: .38rem .55rem; }
  th:first-child { min-width: 7rem; max-width: 38vw; }
}
@media print { .scroll { overflow: visible; border: 0; } nav { display: none; } h2 { break-after: avoid; } }
"""

LEGEND = (
    "In tables, the best of our numbers in a column is bold, interrupted ones aside. An asterisk marks a training length. "
    "OOM: the memory did not suffice. refused: the combination means nothing, or nothing can compute it. failed: an error. "
    "not run: nobody asked for it. Shaded rows are numbers of papers, of other models and data than ours."
)


def render(document: ReportDocument) -> str:
    """The file report.html."""
    title = escape(document.title)
    links = "".join(f'<li><a href="#{each.name}">{escape(each.title)}</a></li>' for each in document.sections)
    sections = "\n".join(_section(each) for each in document.sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{title}</title>\n<style>{CSS}</style>\n</head>\n<body>\n'
        f'<header>\n<h1>{title}</h1>\n<p class="summary">{escape(document.summary)}</p>\n'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n</header>\n'
        f"<main>\n{sections}\n</main>\n<footer><p>{escape(LEGEND)}</p></footer>\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    blocks = "\n".join("\n".join(_block(block)) for block in section.blocks)
    return f'<section id="{section.name}">\n<h2>{escape(section.title)}</h2>\n{blocks}\n</section>'


def _block(block: ReportBlock) -> Iterator[str]:
    if block.heading:
        yield f"<h3>{escape(block.heading)}</h3>"
    if block.figures:
        kind = "figures single" if len(block.figures) == 1 else "figures"
        yield f'<div class="{kind}">{"".join(map(_figure, block.figures))}</div>'
    yield from map(_table, block.tables)
    yield from (f'<p class="how">{escape(text)}</p>' for text in block.text)


def _figure(figure: Figure) -> str:
    light, dark = (_data_uri(charts.svg(figure, each)) for each in (charts.ON_LIGHT, charts.ON_DARK))
    width, height = (round(inches * 100) for inches in figure.size)
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(figure.alt)}" width="{width}" height="{height}"></picture>'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def _data_uri(image: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(image).decode()


def _table(table: Table) -> str:
    header = "".join(f'<th scope="col">{escape(text)}</th>' for text in table.header)
    bodies = "".join(
        _body(table, name, list(lines)) for name, lines in groupby(table.lines, lambda line: line.published)
    )
    label = escape(table.caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<caption><span>{label}</span></caption><thead><tr>{header}</tr></thead>{bodies}</table></div>{_notes(table)}"
    )


def _body(table: Table, published: str, lines: Iterable[Line]) -> str:
    rows = "".join(f"<tr>{_head(line)}{''.join(_cell(table, entry) for entry in line.entries)}</tr>" for line in lines)
    if not published:
        return f"<tbody>{rows}</tbody>"
    if all(line.published for line in table.lines):
        return f'<tbody class="published">{rows}</tbody>'
    head = f'<th scope="rowgroup" class="group" colspan="{len(table.header)}"><span>{escape(published)}</span></th>'
    group = f"<tr>{head}</tr>"
    return f'<tbody class="published">{group}{rows}</tbody>'


def _head(line: Line) -> str:
    detail = f"<small>{escape(line.detail)}</small>" if line.detail else ""
    return f'<th scope="row">{escape(line.name)}{detail}</th>'


def _cell(table: Table, entry: Entry) -> str:
    states = {"absent": entry.absent, "best": entry.best, "text": entry.wide}
    kinds = " ".join(name for name, holds in states.items() if holds)
    opening = f'<td class="{kinds}">' if kinds else "<td>"
    detail = f"<small>{escape(entry.detail)}</small>" if entry.detail else ""
    return f"{opening}{escape(entry.text)}{_reference(table, entry)}{detail}</td>"


def _reference(table: Table, entry: Entry) -> str:
    if not entry.note:
        return ""
    number = table.footnotes()[entry.note]
    return f'<sup><a href="#{table.name}-{number}">{number}</a></sup>'


def _notes(table: Table) -> str:
    numbered = [
        f'<li id="{table.name}-{number}"><sup>{number}</sup> {escape(note)}</li>'
        for note, number in table.footnotes().items()
    ]
    items = "".join([*numbered, *(f"<li>{escape(note)}</li>" for note in (*table.notes, *table.sources))])
    return f'<ul class="notes">{items}</ul>' if items else ""
