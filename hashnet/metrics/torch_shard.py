"""The same counts and keys on a GPU, with torch: distances of a tile by a matrix product of ±1.

A tile of queries x items lives on the device and is dropped at once. Products of codes of up to 2,048 bits
are exact in float16, those of longer ones in float32.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hashnet.codes import check_codes, unpack_codes
from hashnet.kernels import HASH_BITS, hash_bits
from hashnet.labels import LabelSets
from hashnet.metrics.shard import QueryCounts, tie_hash

if TYPE_CHECKING:
    import torch

TILE = 1 << 24  # distances held at once


def has_cuda() -> bool:
    """Whether torch is installed and finds a GPU; torch is not imported where there is no driver."""
    if "torch" not in sys.modules and not os.path.exists("/dev/nvidiactl"):
        return False
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


@dataclass(frozen=True)
class TorchShard:
    """Database items on a device: packed codes, tie hashes and labels (class lists stay on the host)."""

    n: int
    n_bits: int
    codes: np.ndarray
    hashes: torch.Tensor  # int64 (n,), below 2**52
    labels: LabelSets
    device: str

    @classmethod
    def build(
        cls,
        codes: np.ndarray,
        labels: LabelSets,
        row_ids: np.ndarray | None = None,
        seed: int = 0,
        device: str = "cuda",
    ) -> TorchShard:
        """The shard of packed codes (n, n_bits // 8); row ids default to 0 … n - 1."""
        import torch

        from hashnet.models import device_memory

        codes = check_codes(codes)
        hashes = tie_hash(np.arange(len(codes)) if row_ids is None else row_ids, seed)
        with device_memory(f"{len(codes):,} items", "use device=cpu"):
            on_device = torch.from_numpy(hashes.view(np.int64)).to(device)
        return cls(len(codes), codes.shape[1] * 8, codes, on_device, labels, device)

    def count(
        self, query_codes: np.ndarray, query_labels: LabelSets, k: int, threads: int | None = None
    ) -> QueryCounts:
        """The QueryCounts of packed query codes, equal to that of ``Shard`` to the last bit."""
        from hashnet.models import device_memory

        with device_memory(f"{len(query_codes)} queries x {self.n:,} items", "use device=cpu"):
            return self._count(query_codes, query_labels, k)

    def _count(self, query_codes: np.ndarray, query_labels: LabelSets, k: int) -> QueryCounts:
        import torch

        queries = self._signs(check_codes(query_codes, self.n_bits))
        query_sets = _multi_hot(query_labels, 0, len(query_labels), self.device)
        n_hash = hash_bits(self.n_bits)
        q, k, bins = len(queries), min(k, self.n), self.n_bits + 1
        counts = torch.zeros(2 * q * bins, dtype=torch.int64, device=self.device)
        best = torch.empty((q, 0), dtype=torch.int64, device=self.device)
        row = torch.arange(q, device=self.device)[:, None] * bins
        step = max(1, TILE // max(q, self.n_bits, query_labels.n_classes))
        for first in range(0, self.n, step):
            last = min(first + step, self.n)
            product = queries @ self._signs(self.codes[first:last]).T  # (q, tile): n_bits - 2 distance
            distance = (self.n_bits - product.round().long()) // 2
            relevant = (query_sets @ _multi_hot(self.labels, first, last, self.device).T) > 0
            place = (row + distance).flatten()
            counts[: q * bins] += torch.bincount(place, minlength=q * bins)
            counts[q * bins :] += torch.bincount(place[relevant.flatten()], minlength=q * bins)
            # uint64 order in int64: the top bit, set from half of the distances on, is turned round
            keys = (distance - (1 << (62 - n_hash))) << (n_hash + 1)
            keys = keys | (self.hashes[first:last] >> (HASH_BITS - n_hash) << 1) | relevant.long()
            best = torch.cat([best, keys], dim=1)
            best = best.topk(min(k, best.shape[1]), dim=1, largest=False, sorted=True).values
        keys_out = best.cpu().numpy().view(np.uint64) ^ np.uint64(1 << 63)
        return QueryCounts(counts.cpu().numpy().reshape(2, q, bins), keys_out)

    def _signs(self, codes: np.ndarray) -> torch.Tensor:
        import torch

        half = self.device.startswith("cuda") and self.n_bits <= 2048
        return torch.from_numpy(unpack_codes(codes)).to(self.device, torch.float16 if half else torch.float32)


def _multi_hot(labels: LabelSets, first: int, last: int, device: str) -> torch.Tensor:
    """float (rows, n_classes) of rows first … last - 1."""
    import torch

    some = labels.rows(first, last)
    kind = torch.float16 if device.startswith("cuda") else torch.float32
    dense = torch.zeros((len(some), some.n_classes), dtype=kind, device=device)
    owner = np.repeat(np.arange(len(some)), some.per_row)
    dense[torch.from_numpy(owner).to(device), torch.from_numpy(some.classes.astype(np.int64)).to(device)] = 1
    return dense
