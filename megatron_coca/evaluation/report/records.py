"""The file results.json: the sentence at the top of a report, every table with its cells, and every number."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_coca.evaluation.report.document import Headline, ReportDocument, Table, TableCell
from megatron_coca.evaluation.report.tidy import TidyRow

CELL = ("text", "value", "low", "high", "seeds", "detail", "note", "best")
"""The fields of a cell in the file. Empty fields are left out."""


def json_text(document: ReportDocument, rows: Sequence[TidyRow]) -> str:
    """Return results.json. Numbers that are not finite become strings, such as "Infinity", like in result files."""
    top, blocks = document.headline, [block for section in document.sections for block in section.blocks]
    content = {
        "title": document.title,
        "claim": None if top is None else _claim(top),
        "tables": [_table(table) for table in document.tables()],
        "figures": [
            {"name": figure.name, "caption": figure.caption, "alt": figure.alt} for figure in document.figures()
        ],
        "provenance": [line for block in blocks for line in (*block.text, *block.provenance)],
        "numbers": [_finite(asdict(row)) for row in rows],
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _claim(top: Headline) -> dict[str, Any]:
    return {"sentence": top.sentence, "basis": top.basis, "names": dict(top.names), "table": _table(top.table)}


def _table(table: Table) -> dict[str, Any]:
    rows = [
        {
            "name": row.name,
            "published": row.published,
            "cells": [_finite(_fields(cell)) for cell in row.cells],
        }
        for row in table.rows
    ]
    return {
        "name": table.name,
        "caption": table.caption,
        "header": table.header,
        "rows": rows,
        "notes": [*table.notes, *table.sources],
    }


def _fields(cell: TableCell) -> dict[str, Any]:
    found = {name: getattr(cell, name) for name in CELL}
    return {name: value for name, value in found.items() if value is not None and value != "" and value is not False}


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    named = {math.inf: "Infinity", -math.inf: "-Infinity"}
    return {
        name: ("NaN" if value != value else named.get(value, value)) if isinstance(value, float) else value
        for name, value in record.items()
    }
