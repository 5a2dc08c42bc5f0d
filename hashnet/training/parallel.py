"""A model on several workers, and what of it is in training mode."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hashnet.models import HashModel
from hashnet.training.gather import world
from hashnet.training.settings import FitSettings

BATCHNORM = (nn.modules.batchnorm._BatchNorm,)


def distribute(model: HashModel, settings: FitSettings, device: torch.device) -> nn.Module:
    """The model itself in one process, else wrapped so that gradients are averaged over the workers.

    All workers begin with worker 0's weights and buffers.
    """
    if world()[1] == 1:
        return model
    moving = settings.train_batchnorm and any(isinstance(m, BATCHNORM) for m in model.modules())
    on_gpu = device.type == "cuda"
    if moving and on_gpu:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # there is none for CPUs
    return DistributedDataParallel(
        model,
        device_ids=[device] if on_gpu else None,
        forward_sync_buffers=moving,  # at the start they are in any case
        gradient_as_bucket_view=True,
    )


def train_mode(model: HashModel, settings: FitSettings) -> None:
    """Training mode, but for a frozen backbone and for BatchNorm whose statistics are to stay."""
    model.train()
    if settings.freeze_backbone:
        model.backbone.eval()
    if not settings.train_batchnorm:
        for module in model.modules():
            if isinstance(module, BATCHNORM):
                module.eval()
