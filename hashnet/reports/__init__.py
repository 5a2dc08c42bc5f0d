"""Figures and pages: the report of one run, of its near-duplicates, and of a comparison."""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.reports import figures
    from hashnet.reports.comparison.report import ComparisonInfo, write_comparison_report
    from hashnet.reports.comparison.unlabelled import write_neighbour_comparison
    from hashnet.reports.dedup_report import write_dedup_report
    from hashnet.reports.neighbours_report import write_neighbour_report
    from hashnet.reports.run_report import RunSources, write_run_report

__all__, __getattr__ = lazy_names(__name__)
