"""Methods side by side: which there are, running one cell (method x code length x seed), choosing settings.

What a comparison found is drawn by ``hashnet.reports``.
"""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.comparison.cell import (
        Cell,
        CellResult,
        CellTask,
        Features,
        RowValues,
        deep_config,
        finished_cell,
        read_cell,
        run_cell,
    )
    from hashnet.comparison.methods import (
        DEEP,
        FROM_NEIGHBOURS,
        FULL_NAMES,
        GROUPS,
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

__all__, __getattr__ = lazy_names(__name__)
