"""How batches reach a device and results come back: at once on a CPU, overlapped on a GPU.

A feed has ``start(batch, call) → ticket`` and ``finish(ticket) → result on the CPU``. The loop that uses it
(``BatchedInference``) starts batch i + 1 before it finishes batch i, while batch i + 2 is being decoded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Protocol

import torch

Call = Callable[[torch.Tensor], torch.Tensor]  # a batch on the device → its outputs there


class Feed(Protocol):
    """Hands batches to a device, of which at most ``in_flight`` are started and not yet finished."""

    in_flight: int

    def start(self, batch: torch.Tensor, call: Call) -> Any: ...

    def finish(self, ticket: Any) -> torch.Tensor: ...


class HostFeed:
    """The CPU: a batch is computed when it is started."""

    in_flight = 1

    def start(self, batch: torch.Tensor, call: Call) -> torch.Tensor:
        return call(batch).float()

    def finish(self, ticket: torch.Tensor) -> torch.Tensor:
        return ticket


@dataclass
class _Slot:
    """Memory that one batch in flight uses, kept from batch to batch."""

    copied: Any  # CUDA events
    done: Any
    pinned: torch.Tensor | None = None
    on_device: torch.Tensor | None = None

    def fit(self, batch: torch.Tensor, device: torch.device) -> None:
        if self.pinned is None or self.pinned.shape != batch.shape or self.pinned.dtype != batch.dtype:
            self.pinned = torch.empty(batch.shape, dtype=batch.dtype, pin_memory=True)
            self.on_device = torch.empty(batch.shape, dtype=batch.dtype, device=device)


class CudaFeed:
    """A GPU: batch i + 1 is copied on a stream of its own while batch i is computed.

    Each thread has two slots, which it uses in turn: a caller must finish batch i before it starts i + 2.
    """

    in_flight = 2

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._of_thread = threading.local()

    def start(self, batch: torch.Tensor, call: Call) -> tuple[torch.Tensor, Any]:
        mine = self._of_thread
        if not hasattr(mine, "slots"):
            mine.stream = torch.cuda.Stream(self.device)
            mine.slots = cycle([_Slot(torch.cuda.Event(), torch.cuda.Event()) for _ in range(self.in_flight)])
        slot = next(mine.slots)
        slot.fit(batch, self.device)
        slot.pinned.copy_(batch)
        with torch.cuda.stream(mine.stream):
            slot.on_device.copy_(slot.pinned, non_blocking=True)
            slot.copied.record(mine.stream)
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(slot.copied)
        outputs = call(slot.on_device).float()
        result = torch.empty(outputs.shape, pin_memory=True).copy_(outputs, non_blocking=True)
        slot.done.record(compute)
        return result, slot.done

    def finish(self, ticket: tuple[torch.Tensor, Any]) -> torch.Tensor:
        result, done = ticket
        done.synchronize()
        return result


def make_feed(device: torch.device) -> Feed:
    """The feed of a device."""
    return CudaFeed(device) if device.type == "cuda" else HostFeed()
