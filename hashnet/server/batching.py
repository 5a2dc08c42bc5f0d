"""Batcher: runs what arrives at the same time as one call. It never waits for more when idle.

While a call runs in its thread, new work collects; the next call takes all of it. A call that is expected
to be short runs on the event loop itself: handing half a millisecond of work to a thread costs too much.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from hashnet.errors import HashnetError

CROWDED = 20  # after this many calls with a single item each, no call waits for further items
T = TypeVar("T", bound=Sized)
R = TypeVar("R")


class Batcher(Generic[T, R]):
    """Calls ``run`` with the items that wait, at most ``max_rows`` rows together; results keep their order.

    ``run`` returns one result per item, with an error in place of one that failed alone. With
    ``inline_s``, a batch that by earlier ones takes less than this runs on the event loop.
    """

    def __init__(
        self,
        run: Callable[[Sequence[T]], Sequence[R | HashnetError]],
        *,
        max_rows: int,
        inline_s: float = 0.0,
        name: str = "batch",
    ) -> None:
        self._run, self._max_rows, self._inline_s = run, max_rows, inline_s
        self.pool = ThreadPoolExecutor(1, thread_name_prefix=name)  # its one thread makes all calls
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._busy = False
        self._crowded = 0  # how many of the next calls still wait for items of the same moment
        self._last = -1.0  # when a call was made at once
        self._row_s = float("inf")  # seconds per row, as of lately; not known yet

    async def submit(self, item: T) -> R:
        """The result of ``item``; raises where ``run`` failed or put an error in its place."""
        loop = asyncio.get_running_loop()
        if not self._busy and not self._crowded and len(item) * self._row_s < self._inline_s:
            if loop.time() == self._last:  # the second in one turn of the loop: there are several clients
                self._crowded = CROWDED
            else:
                self._last = loop.time()
                return self._at_once(item)
        future: asyncio.Future[R] = loop.create_future()
        self._waiting.append((item, future))
        if not self._busy:
            self._busy = True
            loop.call_soon(self._next, loop)  # after the other requests that arrived together were parsed
        return await future

    def _at_once(self, item: T) -> R:
        results = self._timed([item], len(item))
        result = results if isinstance(results, BaseException) else results[0]
        if isinstance(result, BaseException):
            raise result
        return result

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the next batch, or becomes idle."""
        batch, rows = self._take()
        if not batch:
            self._busy = False
            return
        self._crowded = CROWDED if len(batch) > 1 else max(0, self._crowded - 1)
        items = [item for item, _ in batch]
        if rows * self._row_s < self._inline_s:
            self._deliver(batch, self._timed(items, rows))
            loop.call_soon(self._next, loop)
            return
        running = loop.run_in_executor(self.pool, self._timed, items, rows)

        def done(finished: asyncio.Future) -> None:
            self._deliver(batch, finished.result())
            self._next(loop)

        running.add_done_callback(done)

    def _take(self) -> tuple[list[tuple[T, asyncio.Future[R]]], int]:
        """(the items to run next, their rows); items that nobody waits for any more are dropped."""
        batch: list[tuple[T, asyncio.Future[R]]] = []
        rows = 0
        while self._waiting and (not batch or rows + len(self._waiting[0][0]) <= self._max_rows):
            item, future = self._waiting.pop(0)
            if not future.done():
                batch.append((item, future))
                rows += len(item)
        return batch, rows

    def _timed(self, items: Sequence[T], rows: int) -> Sequence[R | HashnetError] | BaseException:
        started = time.perf_counter()
        try:
            return self._run(items)
        except BaseException as error:
            return error
        finally:
            row_s = (time.perf_counter() - started) / max(rows, 1)
            self._row_s = min(row_s, 1.1 * self._row_s)  # a busy machine makes single calls slow

    @staticmethod
    def _deliver(
        batch: list[tuple[T, asyncio.Future[R]]], results: Sequence[R | HashnetError] | BaseException
    ) -> None:
        failed = isinstance(results, BaseException)
        for number, (_, future) in enumerate(batch):
            result = results if failed else results[number]  # type: ignore[index]
            if future.done():  # its client has gone
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)  # type: ignore[arg-type]
