"""One batch over several workers: the model on each of them, and rows gathered with their gradient.

Every worker computes the same loss of the whole batch. DistributedDataParallel then averages the
gradients of the weights over the workers, while the loss needs their sum, so the backward pass
multiplies by the number of workers: N workers with B / N rows each take exactly the step of one worker
with B rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hashnet.models import HashModel
from hashnet.training.train_config import FitSettings

BATCHNORM = (nn.modules.batchnorm._BatchNorm,)


def world() -> tuple[int, int]:
    """(rank, number of workers) of this process; (0, 1) outside a process group."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor) -> torch.Tensor:
        rank, n_workers = world()
        ctx.n_workers, ctx.first, ctx.n = n_workers, rank * len(local), len(local)
        gathered = local.new_empty((n_workers * len(local), *local.shape[1:]))
        distributed.all_gather(list(gathered.chunk(n_workers)), local.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        # Every worker has the same loss: the sum over n workers of this slice's gradient is n times this one.
        (gradient,) = gradients
        return gradient[ctx.first : ctx.first + ctx.n] * ctx.n_workers


def gather_rows(local: torch.Tensor) -> torch.Tensor:
    """(n_workers * n, …) from every worker's (n, …), equal on all of them, differentiable."""
    return local if world()[1] == 1 else _Gather.apply(local)


def from_first(value: float) -> float:
    """Worker 0's value on every worker, so that all take the same decision."""
    if world()[1] == 1:
        return value
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    carried = torch.tensor([value], dtype=torch.float64, device=device)
    distributed.broadcast(carried, 0)
    return float(carried.item())


def distribute(model: HashModel, settings: FitSettings, device: torch.device) -> nn.Module:
    """The model itself in one process, else wrapped so that gradients are averaged over the workers.

    All workers start with worker 0's weights and buffers.
    """
    if world()[1] == 1:
        return model
    moving = settings.train_batchnorm and any(isinstance(m, BATCHNORM) for m in model.modules())
    on_gpu = device.type == "cuda"
    if moving and on_gpu:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # torch has none for CPUs
    return DistributedDataParallel(
        model,
        device_ids=[device] if on_gpu else None,
        forward_sync_buffers=moving,  # at the start they are synchronised in any case
        gradient_as_bucket_view=True,
    )
