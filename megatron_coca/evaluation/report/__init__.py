"""A folder of results as one page, in the papers' layout, with the papers' numbers beside ours."""

from megatron_coca.evaluation.report.command import REPORT, build_report

__all__ = ["REPORT", "build_report"]
