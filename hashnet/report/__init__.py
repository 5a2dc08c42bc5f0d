"""Figures and the HTML report of an evaluation.

from hashnet.report import figures
figures.precision_recall({"HashNet": report_a, "ITQ": report_b})      # matplotlib axes
"""

from hashnet.report import figures

__all__ = ["figures"]
