"""The report of an evaluation run, as one HTML file that needs nothing else."""

from blendkv.eval.report.page import write_report

__all__ = ["write_report"]
