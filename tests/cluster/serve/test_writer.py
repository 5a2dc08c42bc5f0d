"""Changes on their way from an HTTP replica to the writer. No Ray."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from cluster.serve.replicas import RayWriter
from hashnet.server import ApiError


def writer_that(answer):
    """A RayWriter whose calls take a while and are recorded, and the calls."""
    calls = []

    async def write(changes):
        calls.append(changes)
        await asyncio.sleep(0.02)
        return answer(changes)

    return RayWriter(SimpleNamespace(write=SimpleNamespace(remote=write))), calls


def test_changes_that_arrive_during_a_call_share_the_next_one():
    writer, calls = writer_that(lambda changes: [f"{change} is written" for change in changes])

    async def many():
        first = asyncio.create_task(writer.write(0))
        await asyncio.sleep(0.01)
        return await asyncio.gather(first, *map(writer.write, range(1, 9)))

    assert asyncio.run(many()) == [f"{n} is written" for n in range(9)]
    assert calls == [[0], list(range(1, 9))]
    assert asyncio.run(writer.write(9)) == "9 is written"  # idle again


def test_a_change_that_fails_takes_no_other_with_it():
    def answer(changes):
        return [ApiError("taken", "is taken", 409) if n == 1 else n for n in changes]

    writer, _ = writer_that(answer)

    async def many():
        return await asyncio.gather(*map(writer.write, range(3)), return_exceptions=True)

    found = asyncio.run(many())
    assert [found[0], found[2]] == [0, 2]
    assert found[1].status == 409


def test_a_lost_writer_leaves_the_outcome_open():
    def answer(_):
        raise ActorDiedError

    writer, _ = writer_that(answer)
    with pytest.raises(ApiError, match="whether the change was made is not known"):
        asyncio.run(writer.write(1))


def test_a_change_that_nobody_waits_for_is_not_sent():
    writer, calls = writer_that(lambda changes: changes)

    async def given_up():
        first = asyncio.create_task(writer.write(0))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(writer.write(1))
        await asyncio.sleep(0)
        second.cancel()
        await first
        await asyncio.sleep(0.05)

    asyncio.run(given_up())
    assert calls == [[0]]
