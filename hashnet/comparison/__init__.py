"""Methods side by side: which there are, running one cell (method x code length x seed), choosing settings.

What a comparison found is drawn by ``hashnet.reports``.
"""

from hashnet.comparison.cell import (
    Cell,
    CellResult,
    CellTask,
    Features,
    deep_config,
    finished_cell,
    run_cell,
)
from hashnet.comparison.methods import (
    DEEP,
    OWN,
    PAPER_K,
    PQ,
    TABLE_METHODS,
    TITLES,
    UNLABELLED,
    candidates,
    expand_methods,
    reported_map,
)
from hashnet.comparison.tuning import SettingsScore, TunedSettings, mean_over_seeds

__all__ = [
    "DEEP",
    "OWN",
    "PAPER_K",
    "PQ",
    "TABLE_METHODS",
    "TITLES",
    "UNLABELLED",
    "Cell",
    "CellResult",
    "CellTask",
    "Features",
    "SettingsScore",
    "TunedSettings",
    "candidates",
    "deep_config",
    "expand_methods",
    "finished_cell",
    "mean_over_seeds",
    "reported_map",
    "run_cell",
]
