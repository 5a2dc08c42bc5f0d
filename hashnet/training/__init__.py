"""Training: the continuation schedule, one loop for every deep method, checkpoints."""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.training.assemble import make_model
    from hashnet.training.config import HOW, VARIANTS, TrainConfig
    from hashnet.training.data import held_out, open_rows
    from hashnet.training.feature_scaling import standardise
    from hashnet.training.gather import from_first
    from hashnet.training.history import read_history
    from hashnet.training.loop import fit
    from hashnet.training.measure import logits_of
    from hashnet.training.run import (
        finished_result,
        prepare,
        read_config,
        record_data,
        refuse_other_config,
        refuse_unlabelled,
        result_of,
        settle_manifest,
    )
    from hashnet.training.schedule import plain
    from hashnet.training.settings import FitSettings
    from hashnet.training.sources import ArraySource
    from hashnet.training.worker import train_run

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "assemble": ["make_model"],
        "config": ["HOW", "TrainConfig", "VARIANTS"],
        "data": ["held_out", "open_rows"],
        "gather": ["from_first"],
        "history": ["read_history"],
        "loop": ["fit"],
        "measure": ["logits_of"],
        "run": [
            "finished_result",
            "prepare",
            "read_config",
            "record_data",
            "refuse_other_config",
            "refuse_unlabelled",
            "result_of",
            "settle_manifest",
        ],
        "schedule": ["plain"],
        "settings": ["FitSettings"],
        "sources": ["ArraySource"],
        "feature_scaling": ["standardise"],
        "worker": ["train_run"],
    },
)
