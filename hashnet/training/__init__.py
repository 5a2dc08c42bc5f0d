"""Training: the continuation schedule, one loop for every deep method, checkpoints, diagnostics."""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.training.batches import from_first
    from hashnet.training.checkpoints import EpochRecord, StageRecord, StepRecord, read_history
    from hashnet.training.diagnostics import StepProgress, logits_of
    from hashnet.training.estimator import HashNet
    from hashnet.training.frozen_backbone import features_of_run, standardise
    from hashnet.training.inputs import ArraySource, held_out, open_rows
    from hashnet.training.loop import Callbacks, fit
    from hashnet.training.preparation import (
        finished_result,
        frozen_pretrained,
        learn_from_neighbours,
        prepare,
        prepare_manifest,
        read_config,
        record_data,
        refuse_other_config,
        refuse_unlabelled,
        result_of,
        write_neighbours,
    )
    from hashnet.training.schedule import plain, staged
    from hashnet.training.train_config import EXECUTION_KEYS, KINDS, FitSettings, TrainConfig
    from hashnet.training.trainer import TrainingSummary, make_model, train_run

__all__, __getattr__ = lazy_names(__name__)
