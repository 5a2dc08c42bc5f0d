"""Figures and pages: the report of one run, and of a comparison."""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.reports import figures
    from hashnet.reports.comparison.cells import Cell, Features, Task, deep_config, finished, run_cell
    from hashnet.reports.comparison.html_report import write_report
    from hashnet.reports.comparison.methods import DEEP, TITLES, candidates, expand
    from hashnet.reports.comparison.paper import DEPTH
    from hashnet.reports.run_report import write_run_report

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "comparison.cells": ["Cell", "Features", "Task", "deep_config", "finished", "run_cell"],
        "comparison.html_report": ["write_report"],
        "comparison.methods": ["DEEP", "TITLES", "candidates", "expand"],
        "comparison.paper": ["DEPTH"],
        "figures": ["figures"],
        "run_report": ["write_run_report"],
    },
)
