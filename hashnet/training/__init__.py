"""Training: the continuation schedule, one loop for every deep method, checkpoints, the model bundle."""

from hashnet.training.bundle import BundleInfo, bundle_info, load_bundle, save_bundle
from hashnet.training.checkpoints import Checkpoints
from hashnet.training.history import History, read_history
from hashnet.training.loop import fit
from hashnet.training.optimiser import FitSettings
from hashnet.training.schedule import Stage, plain, smooth, staged
from hashnet.training.standardise import standardise

__all__ = [
    "BundleInfo",
    "Checkpoints",
    "FitSettings",
    "History",
    "Stage",
    "bundle_info",
    "fit",
    "load_bundle",
    "plain",
    "read_history",
    "save_bundle",
    "smooth",
    "staged",
    "standardise",
]
