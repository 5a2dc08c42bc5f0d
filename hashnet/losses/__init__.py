"""Losses, one per file, all with one signature, so that one training loop runs every deep method.

    loss(logits (n, n_bits), rows (n,) int64, valid (n,) bool, beta) → scalar tensor

``METHODS`` registers them: see ``hashnet.losses.methods``.
"""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.losses.cnnh import CNNHLoss, similarity_codes
    from hashnet.losses.dhn import DHNLoss
    from hashnet.losses.dnnh import DNNHLoss
    from hashnet.losses.label_term import LabelTermLoss
    from hashnet.losses.methods import AUTO, METHODS, DeepMethod, Loss, make_loss, variant_for
    from hashnet.losses.pairwise import LabelSimilarity, PairwiseLoss, Similarity, TableSimilarity

__all__, __getattr__ = lazy_names(__name__)
