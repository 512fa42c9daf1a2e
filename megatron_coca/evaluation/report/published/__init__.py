"""What papers report, to stand beside our measurements: never mixed with them, as it is of other models and data."""

from megatron_coca.evaluation.report.published import coca, rerope
from megatron_coca.evaluation.report.published.records import PublishedRow, PublishedTable, Use, use_of

TABLES: tuple[PublishedTable, ...] = coca.TABLES + rerope.TABLES
"""Every published table that reports know."""

__all__ = ["TABLES", "PublishedRow", "PublishedTable", "Use", "use_of"]
