"""Training: the continuation schedule, one loop for every deep method, the model bundle."""

from hashnet.training.bundle import BundleInfo, bundle_info, load_bundle, save_bundle

__all__ = ["BundleInfo", "bundle_info", "load_bundle", "save_bundle"]
