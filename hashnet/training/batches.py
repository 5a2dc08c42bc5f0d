"""Which rows are in which batch: a function of (seed, step), never of the number of workers.

A batch is a list of positions in the training set. Workers take equal slices of it; a batch that does not
fill the slices is padded with rows marked invalid: they carry no loss, but go through the network.

Every worker computes the same loss of the whole batch, from logits gathered with their gradient.
DistributedDataParallel then averages the gradients of the weights over the workers, while the loss needs
their sum, so the backward pass multiplies by the number of workers: N workers with B / N rows each take
exactly the step of one worker with B rows.

A worker's rows need not pass through the network at once: see ``chunk_rows``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hashnet.errors import ConfigError
from hashnet.models import HashModel
from hashnet.training.train_config import FitSettings


class BatchSlice(NamedTuple):
    """One worker's part of a batch, and the whole batch, padded to the same size for every worker."""

    rows: np.ndarray  # int64 (batch / workers,), this worker's
    all_rows: np.ndarray  # int64 (batch,), every worker's, in rank order
    valid: np.ndarray  # bool (batch,), false for padding
    first: int  # where this worker's rows begin in all_rows


class Sampler(Protocol):
    """``rows_of(step)``: positions in the batch of that step, int64; at most ``batch_size`` of them.

    ``padding_of(step)``: rows that fill that batch up; many different ones, as BatchNorm sees them too.
    """

    batch_size: int
    steps_per_epoch: int

    def rows_of(self, step: int) -> np.ndarray: ...

    def padding_of(self, step: int) -> np.ndarray: ...


class RowSampler:
    """Every row once per epoch, in an order drawn from (seed, epoch); the last batch may be shorter."""

    def __init__(self, n_rows: int, batch_size: int, seed: int) -> None:
        self.n_rows, self.batch_size, self.seed = n_rows, min(batch_size, n_rows), seed
        self.steps_per_epoch = -(-n_rows // self.batch_size)
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def rows_of(self, step: int) -> np.ndarray:
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.n_rows)
            self._epoch = epoch
        return self._order[place * self.batch_size : (place + 1) * self.batch_size]

    def padding_of(self, step: int) -> np.ndarray:
        """The first batch of the epoch, which is full: the last one may be a single row."""
        return self.rows_of(step - step % self.steps_per_epoch)


class PairSampler:
    """Batches around listed pairs: batch_size / 2 pairs at a time, then the different rows in them.

    The list is walked in an order drawn from (seed, pass), then again in another. An epoch has as many
    batches as would show each row once, so that a schedule in epochs means the same as without pairs.
    """

    def __init__(self, a: Any, b: Any, batch_size: int, seed: int) -> None:
        self.a, self.b = np.asarray(a, dtype=np.int64), np.asarray(b, dtype=np.int64)
        n_rows = len(np.unique(np.concatenate([self.a, self.b])))
        self.n_pairs, self.seed = max(1, batch_size // 2), seed  # pairs of a batch
        self.batch_size = min(batch_size, n_rows)
        self.steps_per_epoch = -(-n_rows // self.batch_size)
        self._walk, self._order = -1, np.empty(0, dtype=np.int64)

    def rows_of(self, step: int) -> np.ndarray:
        places = np.arange(step * self.n_pairs, (step + 1) * self.n_pairs)  # on the endless walk
        chosen = np.empty(self.n_pairs, dtype=np.int64)
        for walk in np.unique(places // len(self.a)):
            here = places // len(self.a) == walk
            chosen[here] = self._order_of(int(walk))[places[here] % len(self.a)]
        return np.unique(np.concatenate([self.a[chosen], self.b[chosen]]))

    def padding_of(self, step: int) -> np.ndarray:
        """The batch itself: its pairs have many different rows, or all there are."""
        return self.rows_of(step)

    def _order_of(self, walk: int) -> np.ndarray:
        if walk != self._walk:  # a long list is not shuffled for every batch
            self._order = np.random.default_rng([self.seed, walk]).permutation(len(self.a))
            self._walk = walk
        return self._order


def batch_slice(sampler: Sampler, step: int, rank: int, world: int) -> BatchSlice:
    """Worker ``rank``'s slice of a step's batch; every worker's slice has ceil(batch_size / world) rows."""
    rows = sampler.rows_of(step)
    per_worker = -(-sampler.batch_size // world)
    valid = np.arange(per_worker * world) < len(rows)
    all_rows = np.empty(len(valid), dtype=np.int64)
    all_rows[valid] = rows
    if not valid.all():
        all_rows[~valid] = np.resize(
            sampler.padding_of(step), len(valid) - len(rows)
        )  # repeated as often as needed
    first = rank * per_worker
    return BatchSlice(all_rows[first : first + per_worker], all_rows, valid, first)


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


def unsynchronised(wrapped: nn.Module) -> AbstractContextManager[Any]:
    """Backward passes inside it add to this worker's gradients alone; the first one after it sums them up."""
    return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()


CHUNK_BYTES = 1 << 30  # on a CPU, that one pass keeps for its backward pass; its peak is about twice that
GPU_SHARE = 3  # on a GPU: a third of what is free


def chunk_rows(model: HashModel, inputs: torch.Tensor, settings: FitSettings) -> int:
    """How many of these rows pass through the network at once: ``settings.chunk``, or what memory allows.

    The gradient of a batch does not depend on it, except through BatchNorm that learns: its statistics are
    those of the rows of a pass, so there all rows stay together.
    """
    if settings.train_batchnorm and any(isinstance(m, BATCHNORM) for m in model.modules()):
        if settings.chunk is not None and settings.chunk < len(inputs):
            raise ConfigError(
                f"chunk={settings.chunk} would change what BatchNorm learns from; leave it out, or use "
                "batchnorm=frozen"
            )
        return len(inputs)
    if settings.chunk is not None:
        return settings.chunk
    if inputs.ndim == 2:  # vectors are light
        return len(inputs)
    return int(
        max(1, min(len(inputs), chunk_bytes(inputs.device) // max(1, saved_bytes(model, inputs[:2]) // 2)))
    )


def chunk_bytes(device: torch.device) -> int:
    """What one pass may keep for its backward pass."""
    return torch.cuda.mem_get_info(device)[0] // GPU_SHARE if device.type == "cuda" else CHUNK_BYTES


def saved_bytes(model: nn.Module, inputs: torch.Tensor) -> int:
    """Bytes that a forward pass keeps for its backward pass, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs)
    return sum(kept.values())
