"""BatchedInference: the one loop that runs a model over rows without training it.

Encoding, diagnostics, the features of a frozen backbone and the deep baselines all use it. Rows are read and
computed in batches of a fixed number of rows, in eval mode and without gradients.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from hashnet.errors import DeviceMemoryError
from hashnet.models.hash_model import HashModel

Read = Callable[[int, int], torch.Tensor]  # rows [start, stop) as the model takes them

# torch's allocator says so by a class of its own; the driver and cuBLAS, by text in a RuntimeError.
OUT_OF_MEMORY = re.compile("CUDA out of memory|CUDA error: out of memory|STATUS_ALLOC_FAILED")


class Submit(Protocol):
    """Runs a function elsewhere, as ``Executor.submit`` does; the result is waited for by ``.result()``."""

    def __call__(self, function: Read, start: int, stop: int, /) -> Any: ...


class OutputModule(nn.Module):
    """The model's ``logits`` or ``features`` as a module of its own, which ``torch.compile`` takes.

    Features are the backbone's output; a ``features`` model has no backbone, so they are what its hash layer
    takes.
    """

    def __init__(self, model: HashModel, output: str) -> None:
        super().__init__()
        self.model, self.output = model, output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.output == "logits":
            return self.model(x)
        return self.model.raw_features(x) if self.model.modality == "image" else self.model.features(x)


class BatchedInference:
    """Callable: float32 (n, width) of n rows, where ``output`` is ``logits`` or ``features``.

    ``pad`` fills the last batch up with zeros: rounding depends on the shape of a batch, so in one shape a
    row's output does not depend on its neighbours. With ``tail_rows`` the rows after the last full batch run
    in batches of that many instead, so that a single row is not padded to a large batch. ``half`` computes in
    float16 on CUDA, ``channels_last`` is the memory layout of pictures that convolutions prefer, and
    ``module`` replaces the module that is called, as a compiled one does. The model stays in eval mode.
    """

    def __init__(
        self,
        model: HashModel,
        output: str = "logits",
        *,
        batch_rows: int,
        device: str | torch.device = "cpu",
        pad: bool = False,
        tail_rows: int | None = None,
        half: bool = False,
        channels_last: bool = False,
        module: Any = None,
    ) -> None:
        self.model, self.batch_rows, self.device = model, batch_rows, torch.device(device)
        self.pad, self.half, self.channels_last = pad, half, channels_last
        self.tail_rows = tail_rows or batch_rows
        self.width = model.n_bits if output == "logits" else model.spec.n_features
        self.feed = make_feed(self.device)
        self.module = module if module is not None else OutputModule(model, output)

    def __call__(
        self,
        read: Read,
        n_rows: int,
        on_batch: Callable[[int], None] | None = None,
        submit: Submit | None = None,
    ) -> torch.Tensor:
        """Outputs of rows 0..n_rows - 1 on the CPU; ``on_batch`` gets the number of rows of each batch.

        ``submit`` reads ahead, as in ``stream``.
        """
        outputs = torch.empty(n_rows, self.width)
        for start, stop, found in self.stream(read, n_rows, submit):
            outputs[start:stop] = found
            if on_batch:
                on_batch(stop - start)
        return outputs

    def stream(
        self, read: Read, n_rows: int, submit: Submit | None = None
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(start, stop, outputs) of each batch in order, while the next ones are under way.

        ``submit`` runs ``read`` elsewhere, one batch ahead: with a thread's, batch i is computed while i + 1
        is copied and i + 2 read. None: ``read`` is called here, as for arrays in memory.
        """
        self.model.to(self.device).eval()
        batches = list(self._batches(n_rows))

        def begin(i: int) -> Callable[[], torch.Tensor]:
            start, stop, _ = batches[i]
            return partial(read, start, stop) if submit is None else submit(read, start, stop).result

        ahead = begin(0) if batches else None
        under_way: deque[tuple[int, int, Any]] = deque()
        for i, (start, stop, shape) in enumerate(batches):
            assert ahead is not None
            batch = ahead()
            ahead = begin(i + 1) if i + 1 < len(batches) else None
            with self._on_device(shape):
                ticket = self.feed.start(self._padded(batch, shape), self._compute)
            under_way.append((start, stop, ticket))
            if len(under_way) == self.feed.in_flight:
                yield self._finish(*under_way.popleft())
        while under_way:
            yield self._finish(*under_way.popleft())

    def _finish(self, start: int, stop: int, ticket: Any) -> tuple[int, int, torch.Tensor]:
        with self._on_device(self.batch_rows):
            return start, stop, self.feed.finish(ticket)[: stop - start]

    @contextmanager
    def _on_device(self, rows: int) -> Iterator[None]:
        with (
            torch.inference_mode(),
            device_memory(f"a batch of {rows} rows", "give the encoder a smaller batch_rows"),
        ):
            yield

    def _compute(self, batch: torch.Tensor) -> torch.Tensor:
        if self.channels_last:
            batch = batch.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.float16, enabled=self.half):
            return self.module(batch)

    def _batches(self, n_rows: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop, rows with padding) of each batch."""
        start = 0
        while start < n_rows:
            shape = self.batch_rows if n_rows - start >= self.batch_rows else self.tail_rows
            yield start, min(start + shape, n_rows), shape
            start += shape

    def _padded(self, batch: torch.Tensor, shape: int) -> torch.Tensor:
        if not self.pad or len(batch) == shape:
            return batch
        padded = batch.new_zeros((shape, *batch.shape[1:]))
        padded[: len(batch)] = batch
        return padded


@contextmanager
def device_memory(what: str, fix: str) -> Iterator[None]:
    """DeviceMemoryError, which names ``what`` did not fit, where the GPU runs out of memory inside."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        first = str(error).strip().partition("\n")[0]
        raise DeviceMemoryError(f"the GPU has too little memory for {what}; {fix} ({first})") from error


def out_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU's memory was too small, whichever part of CUDA noticed it."""
    return isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY.search(str(error)) is not None


def as_tensor(rows: np.ndarray) -> torch.Tensor:
    """The array as a tensor; read-only memory, which torch does not take, is copied."""
    return torch.from_numpy(rows if rows.flags.writeable else rows.copy())


# ---------------------------------------------------------------- feeding a device
# How batches reach a device and results come back: at once on a CPU, overlapped on a GPU.
#
# A feed has ``start(batch, call) → ticket`` and ``finish(ticket) → result on the CPU``. The loop that uses it
# (``BatchedInference``) starts batch i + 1 before it finishes batch i, while batch i + 2 is being decoded.

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

    def fit(self, batch: torch.Tensor, device: torch.device) -> bool:
        """Whether the memory is new: none was there, or a batch of another shape or dtype was."""
        if self.pinned is not None and (self.pinned.shape, self.pinned.dtype) == (batch.shape, batch.dtype):
            return False
        self.pinned = torch.empty(batch.shape, dtype=batch.dtype, pin_memory=True)
        self.on_device = torch.empty(batch.shape, dtype=batch.dtype, device=device)
        return True


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
            # A waiter on `done` sleeps: a busy wait would take a core from the threads that decode.
            mine.slots = cycle(
                [_Slot(torch.cuda.Event(), torch.cuda.Event(blocking=True)) for _ in range(self.in_flight)]
            )
        slot, compute = next(mine.slots), torch.cuda.current_stream(self.device)
        if slot.fit(batch, self.device):
            # The allocator reuses at once the memory that earlier batches have released but their kernels,
            # queued on the compute stream, will still read: the copy must not overtake those.
            mine.stream.wait_stream(compute)
        slot.pinned.copy_(batch)
        with torch.cuda.stream(mine.stream):
            slot.on_device.copy_(slot.pinned, non_blocking=True)
            slot.copied.record(mine.stream)
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


# Training has no results to copy back, and its batches must live until the backward pass has read them: each
# has memory of its own, which torch's allocators keep from batch to batch.


class Copies(Protocol):
    """Brings batches to a device, of which ``ahead`` are copied while one is computed."""

    ahead: int

    def start(self, batch: torch.Tensor) -> Any: ...

    def finish(self, ticket: Any) -> torch.Tensor: ...


class HostCopies:
    """At the moment a batch is needed; on the CPU there is nothing to do."""

    ahead = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self, batch: torch.Tensor) -> torch.Tensor:
        return batch

    def finish(self, ticket: torch.Tensor) -> torch.Tensor:
        return ticket.to(self.device)


class CudaCopies:
    """To a GPU: on a stream of its own, from pinned memory, without which a copy waits for all kernels."""

    ahead = 1

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def start(self, batch: torch.Tensor) -> tuple[torch.Tensor, Any]:
        copied = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            on_device = batch.pin_memory().to(self.device, non_blocking=True)
            copied.record(self.stream)
        return on_device, copied

    def finish(self, ticket: tuple[torch.Tensor, Any]) -> torch.Tensor:
        on_device, copied = ticket
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(copied)
        on_device.record_stream(compute)  # or the next copy could get its memory while kernels still read it
        return on_device


def make_copies(device: torch.device) -> Copies:
    """How training's batches get to a device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies(device)
