"""The report as one page that needs nothing else: no network, no scripts, images inside."""

import base64
from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby

from megatron_coca.evaluation.report import style
from megatron_coca.evaluation.report.document import Block, Document, Entry, Figure, Line, Section, Table
from megatron_coca.evaluation.report.stylesheet import CSS

LEGEND = (
    "In tables, the best of our numbers in a column is bold, interrupted ones aside. An asterisk marks a training length. "
    "OOM: the memory did not suffice. refused: the combination means nothing, or nothing can compute it. failed: an error. "
    "not run: nobody asked for it. Shaded rows are numbers of papers, of other models and data than ours."
)


def render(document: Document) -> str:
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


def _block(block: Block) -> Iterator[str]:
    if block.heading:
        yield f"<h3>{escape(block.heading)}</h3>"
    if block.figures:
        kind = "figures single" if len(block.figures) == 1 else "figures"
        yield f'<div class="{kind}">{"".join(map(_figure, block.figures))}</div>'
    yield from map(_table, block.tables)
    yield from (f'<p class="how">{escape(text)}</p>' for text in block.text)


def _figure(figure: Figure) -> str:
    light, dark = (_data_uri(style.svg(figure, each)) for each in (style.ON_LIGHT, style.ON_DARK))
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
