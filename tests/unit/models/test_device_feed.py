"""Reading, copying and computing overlap: on a stand-in device with fixed times, by a clock that is computed.

The device is asynchronous, as a GPU is: a call queues work and returns, and only ``finish`` waits. Nothing
sleeps; each resource (reader, copy engine, compute engine) knows until when it is busy.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hashnet.models import BatchedInference, build_model, inference
from hashnet.models.inference import CudaCopies, CudaFeed

BATCHES, ROWS = 40, 8


class StandIn:
    """A feed and a reader that take ``read``, ``copy`` and ``compute`` seconds per batch."""

    def __init__(self, read: float, copy: float, compute: float, slots: int = 2) -> None:
        self.read_s, self.copy_s, self.compute_s = read, copy, compute
        self.now = 0.0  # of the loop that starts and finishes batches
        self.reader_free = self.copy_free = self.compute_free = 0.0
        self.in_flight, self.started = slots, 0

    def submit(self, read, start, stop):
        self.reader_free = done = max(self.reader_free, self.now) + self.read_s
        batch = read(start, stop)

        def result():
            self.now = max(self.now, done)
            return batch

        return SimpleNamespace(result=result)

    def start(self, batch, call):
        self.started += 1
        assert self.started <= self.in_flight, "a batch was copied into memory that is still in use"
        self.copy_free = max(self.copy_free, self.now) + self.copy_s
        self.compute_free = max(self.compute_free, self.copy_free) + self.compute_s
        return call(batch), self.compute_free

    def finish(self, ticket):
        self.started -= 1
        outputs, done = ticket
        self.now = max(self.now, done)
        return outputs


def run(device: StandIn) -> float:
    """Batches per second; the outputs are checked."""
    x = np.arange(BATCHES * ROWS, dtype=np.float32)[:, None]
    infer = BatchedInference(
        build_model("features", 8, n_features=1),
        batch_rows=ROWS,
        module=lambda batch: 2 * batch.expand(-1, 8),
    )
    infer.feed = device
    found = infer.stream(lambda a, b: torch.from_numpy(x[a:b]), len(x), device.submit)
    outputs = torch.cat([part for _, _, part in found])
    assert torch.equal(outputs, 2 * torch.from_numpy(x).expand(-1, 8))
    return BATCHES / device.now


@pytest.mark.parametrize(
    "times", [(3, 3, 3), (5, 2, 1), (1, 5, 2), (2, 1, 5), (4, 4, 1), (1, 4, 4), (4, 1, 4), (5, 0, 5)]
)
def test_three_stages_run_at_the_rate_of_the_slowest(times):
    assert run(StandIn(*times)) >= 0.9 / max(times)


def test_without_overlap_they_would_take_turns():
    """The bound above can fail: with one batch in flight, copying and computing take turns."""
    assert run(StandIn(3, 3, 3, slots=1)) < 0.55 / 3


class FakeCuda:
    """Streams and events that write down what happens; memory is the CPU's."""

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.main = self.stream_named("main")

    def stream_named(self, name):
        return SimpleNamespace(
            name=name,
            wait_event=lambda event: self.log.append((name, "waits for", event.n)),
            wait_stream=lambda other: self.log.append((name, "waits for all of", other.name)),
        )

    def event(self, blocking=False):
        event = SimpleNamespace(n=None)

        def record(stream):
            event.n = len(self.log)
            self.log.append((stream.name, "records"))

        event.record = record
        event.synchronize = lambda: self.log.append(("host", "waits for", event.n))
        return event


@pytest.fixture
def fake(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: fake.stream_named("side"))
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.main)
    made = torch.empty
    fake.pinned = 0

    def empty(*shape, pin_memory=False, device=None, **options):
        fake.pinned += pin_memory and len(shape[0]) == 2 and shape[0][1] == 3
        return made(*shape, **options)

    monkeypatch.setattr(inference.torch, "empty", empty)
    return fake


def test_copies_have_a_stream_and_two_buffers_of_their_own(fake):
    feed = CudaFeed(torch.device("cpu"))
    tickets = []
    for i in range(6):
        tickets.append(feed.start(torch.full((4, 3), float(i)), lambda batch: batch.sum(dim=1, keepdim=True)))
        if i:
            assert feed.finish(tickets[i - 1]).flatten().tolist() == [3.0 * (i - 1)] * 4
    assert fake.pinned == 2  # buffers of the batch's shape: kept, not made for each batch
    per_batch = [entry[:2] for entry in fake.log if entry[0] != "host" and "all of" not in entry[1]]
    assert per_batch == [("side", "records"), ("main", "waits for"), ("main", "records")] * 6
    waits = [entry[2] for entry in fake.log if entry[:2] == ("main", "waits for")]
    assert all(fake.log[n] == ("side", "records") for n in waits)


def test_new_memory_is_written_after_the_kernels_that_may_still_read_it(fake):
    """To the allocator, what queued kernels read is free: for their own stream, but not for the copies'."""
    feed, before = CudaFeed(torch.device("cpu")), []
    for rows in (4, 4, 4, 4, 2, 2, 4):
        start = len(fake.log)
        feed.finish(feed.start(torch.zeros(rows, 3), lambda batch: batch.sum(dim=1, keepdim=True)))
        before.append(fake.log[start] == ("side", "waits for all of", "main"))
    assert before == [True, True, False, False, True, True, True]


def test_each_thread_has_its_own_buffers(fake):
    feed = CudaFeed(torch.device("cpu"))

    def call():
        feed.start(torch.zeros(4, 3), lambda batch: batch.sum(dim=1, keepdim=True))

    for thread in [threading.Thread(target=call) for _ in range(2)]:
        thread.start()
        thread.join()
    call()
    assert fake.pinned == 3


def test_training_copies_on_a_stream_of_its_own_and_keeps_what_kernels_read(fake, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda batch: fake.log.append(("host", "pins")) or batch)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda _, stream: fake.log.append((stream.name, "keeps"))
    )
    copies = CudaCopies(torch.device("cpu"))
    first, second = (copies.start(torch.full((4, 3), float(i))) for i in range(2))
    assert torch.equal(copies.finish(first), torch.zeros(4, 3))
    assert torch.equal(copies.finish(second), torch.ones(4, 3))
    # both copies are under way before the first is computed, and each is waited for by itself
    assert fake.log == [
        ("host", "pins"), ("side", "records"), ("host", "pins"), ("side", "records"),
        ("main", "waits for", 1), ("main", "keeps"), ("main", "waits for", 3), ("main", "keeps"),
    ]  # fmt: skip
