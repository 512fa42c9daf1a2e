"""The report as Markdown, for a README and for the console."""

from collections.abc import Iterator
from dataclasses import replace

from megatron_coca.evaluation.markdown import format_table
from megatron_coca.evaluation.report.document import Block, Document, Entry, Line, Table


def render(document: Document) -> str:
    """The file report.md; plots by the names of their files."""
    parts = [f"# {document.title}", document.summary]
    for section in document.sections:
        parts.append(f"## {section.title}")
        for block in section.blocks:
            parts += _block(block)
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> Iterator[str]:
    if block.heading:
        yield f"### {block.heading}"
    yield from block.text
    for table in block.tables:
        yield f"**{table.caption}**"
        yield render_table(table)
    for figure in block.figures:
        yield f"![{_plain(figure.alt)}]({figure.name}.png)"
        yield f"*{figure.caption}*"


def _plain(text: str) -> str:
    return text.replace("[", "(").replace("]", ")")


def render_ours(document: Document) -> str:
    """The tables of what was measured here, without the papers', one after another."""
    parts = [document.title]
    for block in (block for section in document.sections if section.printed for block in section.blocks):
        ours = [_ours(table) for table in block.tables if any(not line.published for line in table.lines)]
        parts += [block.heading] if block.heading and ours else []
        parts += [part for table in ours for part in (table.caption, render_table(table))]
    return "\n\n".join(parts)


def _ours(table: Table) -> Table:
    """Without the papers' rows, and without the columns that are there for them alone."""
    lines = [line for line in table.lines if not line.published]
    asked = [at for at in range(len(table.header) - 1) if any(_tried(line.entries[at]) for line in lines)]
    header = (table.header[0], *(table.header[at + 1] for at in asked))
    kept = tuple(replace(line, entries=tuple(line.entries[at] for at in asked)) for line in lines)
    return replace(table, header=header, lines=kept, sources=())


def _tried(entry: Entry) -> bool:
    return bool(entry.text) and not (entry.absent and not entry.note)


def render_table(table: Table) -> str:
    """A table with its notes below."""
    footnotes = table.footnotes()
    rows = [[_name(line), *(_cell(entry, footnotes) for entry in line.entries)] for line in table.lines]
    header = [text.replace("|", r"\|") for text in table.header]
    parts = [format_table(header, rows)]
    parts += [f"[{number}] {note}" for note, number in footnotes.items()]
    return "\n\n".join([*parts, *table.notes, *table.sources])


def _name(line: Line) -> str:
    name = f"*{line.name}* ({line.published})" if line.published else line.name
    return name.replace("|", r"\|").replace("\n", " ")


def _cell(entry: Entry, footnotes: dict[str, int]) -> str:
    text = f"{entry.text} ({entry.detail})" if entry.detail else entry.text
    text = f"{text} [{footnotes[entry.note]}]" if entry.note else text
    return text.replace("|", r"\|").replace("\n", " ")
