"""Changes on their way from an HTTP replica to the writer. No Ray."""

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from cluster.serve.replicas import RayWriter
from hashnet.server import ApiError, RemoveItems


def writer_that(answer):
    """A RayWriter whose calls take a while and are recorded, and the calls."""
    calls = []

    def write(changes):
        calls.append(changes)
        time.sleep(0.1)
        return SimpleNamespace(result=lambda: answer(changes))

    return RayWriter(SimpleNamespace(write=SimpleNamespace(remote=write))), calls


def change(number):
    return RemoveItems(np.array([number]))


def test_changes_that_arrive_during_a_call_share_the_next_one():
    writer, calls = writer_that(lambda changes: [int(one.ids[0]) for one in changes])

    async def many():
        first = asyncio.create_task(writer.write(change(0)))
        await asyncio.sleep(0.02)
        return await asyncio.gather(first, *(writer.write(change(n)) for n in range(1, 9)))

    assert asyncio.run(many()) == list(range(9))
    assert [len(changes) for changes in calls] == [1, 8]


def test_a_change_that_fails_takes_no_other_with_it():
    def answer(changes):
        return [ApiError("taken", "is taken", 409) if one.ids[0] == 1 else "written" for one in changes]

    writer, _ = writer_that(answer)

    async def many():
        return await asyncio.gather(*(writer.write(change(n)) for n in range(3)), return_exceptions=True)

    found = asyncio.run(many())
    assert [found[0], found[2]] == ["written", "written"]
    assert found[1].status == 409


def test_a_lost_writer_leaves_the_outcome_open():
    def answer(_):
        raise ActorDiedError

    writer, _ = writer_that(answer)
    with pytest.raises(ApiError, match="whether the change was made is not known"):
        asyncio.run(writer.write(change(1)))
