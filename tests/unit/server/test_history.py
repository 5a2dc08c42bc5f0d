"""A randomised history: clients read and write while workers are killed, checked against a dictionary.

Each client has ids of its own, so it knows what every one of them must be. A write that broke off may have
been made or not; the client reads which, and from then on it must stay so.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

from hashnet import BinaryIndex, Client
from hashnet.errors import ClientError, RequestRejected
from tests.support.serving_app import WRITE
from tests.unit.server.test_standalone import Served

N_CLIENTS = 16
FIRST_ID = 1_000_000


class HistoryClient(threading.Thread):
    """Adds, replaces, removes and reads items of its own; keeps what does not agree with its model."""

    def __init__(self, served: Served, number: int, steps: int) -> None:
        super().__init__(daemon=True)
        self.served, self.number, self.steps = served, number, steps
        self.random = random.Random(number)
        self.model: dict[int, bytes] = {}
        self.wrong: list[str] = []
        self.done = self.writes = self.broken = 0

    def run(self) -> None:
        with Client(self.served.url, token=WRITE, retry_s=60, timeout_s=60) as client:
            for _ in range(self.steps):
                try:
                    self.step(client)
                    self.done += 1
                except Exception as error:
                    self.wrong.append(f"client {self.number}: {error!r}")
                    return

    def step(self, client: Client) -> None:
        id_ = FIRST_ID + self.number * 1000 + self.random.randrange(40)
        code = self.random.randbytes(8)
        action = self.random.choice(["add", "upsert", "remove", "item", "search"])
        if action == "item":
            self.expect(id_, self.read(client, id_))
        elif action == "search":
            self.search(client, id_)
        else:
            self.write(client, action, id_, code)

    def write(self, client: Client, action: str, id_: int, code: bytes) -> None:
        before = self.model.get(id_)
        array = np.frombuffer(code, np.uint8)[None]
        refused = (action == "add" and before is not None) or (action == "remove" and before is None)
        after = before if refused else None if action == "remove" else code
        self.writes += 1
        try:
            if action == "remove":
                client.remove([id_])
            else:
                client.add(array, ids=[id_], upsert=action == "upsert")
            if refused:
                self.wrong.append(f"{action} of {id_} was not refused")
        except RequestRejected as error:
            if not refused:
                self.wrong.append(f"{action} of {id_} was refused: {error}")
        except ClientError:  # broken off: made or not made, and it stays so
            self.broken += 1
            # Its worker is dead, so what it wrote is on disk: read that version or a newer one.
            client._written = max(client._written, self.served.version_on_disk())
            found = self.read(client, id_)
            if found not in (before, after):
                self.wrong.append(f"{id_} is neither as before nor as after the broken {action}")
            after = found
        self.model[id_] = after  # type: ignore[assignment]
        if after is None:
            del self.model[id_]

    def read(self, client: Client, id_: int) -> bytes | None:
        try:
            return bytes.fromhex(client.item(id_)["code"])
        except RequestRejected as error:
            return None if error.code == "unknown_id" else b"refused"

    def search(self, client: Client, id_: int) -> None:
        if id_ in self.model:
            hits = client.search(np.frombuffer(self.model[id_], np.uint8), k=1000)
            if id_ not in hits.ids[0][hits.distances[0] == 0]:
                self.wrong.append(f"{id_} is not found by its code")

    def expect(self, id_: int, found: bytes | None) -> None:
        if found != self.model.get(id_):
            self.wrong.append(f"{id_} is not what this client wrote")


def history(run: str, steps: int, kills: int) -> tuple[int, int, int]:
    """(writes, of these broken off, workers killed) of a history without a fault."""
    served = Served(run, "--workers", "2", "model=off", "follow_s=0.1", "max_k=1000")
    clients = [HistoryClient(served, number, steps) for number in range(N_CLIENTS)]
    killed, dice = 0, random.Random(0)
    at = sorted(dice.sample(range(N_CLIENTS * steps // 2), kills))  # steps after which a worker is killed
    try:
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            time.sleep(0.01)
            if killed < kills and sum(client.done for client in clients) >= at[killed]:
                workers = served.children("worker")
                if len(workers) == 2:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(dice.choice(workers).pid, signal.SIGKILL)
                        killed += 1
        wrong = [fault for client in clients for fault in client.wrong]
        assert (wrong, served.end()) == ([], 0)
    finally:
        served.process.kill()
        print(served.process.stderr.read())  # type: ignore[union-attr] # why it ended, where it did
    expected = {id_: code for client in clients for id_, code in client.model.items()}
    index = BinaryIndex.load(f"{run}/index")
    ids = index.ids()[index.ids() >= FIRST_ID]
    assert len(ids) == len(set(ids.tolist()))
    assert set(ids.tolist()) == set(expected)  # nothing acknowledged is lost or duplicated
    assert (index.codes(ids) == np.array([np.frombuffer(expected[i], np.uint8) for i in ids.tolist()])).all()
    return sum(c.writes for c in clients), sum(c.broken for c in clients), killed


@pytest.mark.timeout(280)
def test_a_short_history(own_run: str) -> None:
    writes, _, killed = history(own_run, steps=20, kills=1)
    assert writes > 100
    assert killed == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_long_history(own_run: str) -> None:
    writes, broken, killed = history(own_run, steps=10_000 // N_CLIENTS, kills=12)
    print(f"{writes} writes, {broken} of them broken off, {killed} workers killed")
    assert killed >= 5
