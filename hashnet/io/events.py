"""What a process reports while it works: progress to a person, structured events to log files.

Progress has a rate and the time left: a tqdm bar on a terminal, otherwise a plain line from time to time.

>>> import io
>>> with Progress(3, "rows", "encode", file=io.StringIO()) as progress:
...     progress.update(3, bad=0)

An event is one JSON line with run and shard:

    events.event("shard committed", run="demo", stage="encode", shard="codes-00017", rows=8192, seconds=0.4)

A process writes to its own ``hashnet-PID.jsonl`` in the folder of Ray's logs on its node, where
``ray logs cluster hashnet-*`` and the dashboard find them; they do not flood the driver's terminal.
Without Ray they go to the logger ``hashnet.events`` at level DEBUG. Give names, counts and seconds;
never contents, URIs with options, or anything from the environment.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from functools import lru_cache
from typing import IO, Any

logger = logging.getLogger("hashnet.events")

LINE_EVERY_S = 15.0  # without a terminal: at most four lines per minute …
FIRST_LINE_S = 5.0  # … the first one sooner
AT_MOST_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<at most {remaining}, {rate_fmt}{postfix}]"


class Progress:
    """Counts up to ``total`` (None: unknown) and shows progress, rate and time left.

    ``total`` may be changed on the way; with ``at_most`` the work may end before it is reached.
    """

    def __init__(
        self,
        total: int | None,
        unit: str,
        label: str,
        *,
        done: int = 0,
        at_most: bool = False,
        file: IO[str] | None = None,
    ) -> None:
        self.total, self.unit, self.label = total, unit, label
        self.at_most = "at most " if at_most else ""
        self.outcome: str | None = None  # what the work came to, for its last line
        self.done = self._start_done = done
        self.file = file or sys.stderr
        self._started = time.monotonic()
        self._last_line = self._started - max(LINE_EVERY_S - FIRST_LINE_S, 0)
        self._first: tuple[float, int] | None = None  # when something was done first, and how much
        self._said: int | None = None  # how many were done at the last line
        self._info: dict[str, Any] = {}
        self._bar: Any = None
        if self.file.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                initial=done,
                unit=f" {unit}",
                desc=label,
                file=self.file,
                dynamic_ncols=True,
                bar_format=AT_MOST_BAR if at_most else None,
            )

    @property
    def rate(self) -> float:
        """Units per second since the first of them were done: what starts slowly soon has a true rate."""
        started, done = self._started, self._start_done
        if self._first is not None and self.done > self._first[1]:
            started, done = self._first
        return (self.done - done) / max(time.monotonic() - started, 1e-9)

    def update(self, n: int = 1, **info: Any) -> None:
        """``n`` more are done; ``info`` is shown beside the count."""
        self.done += n
        self._first = self._first or (time.monotonic(), self.done)
        self._info.update(info)
        if self._bar is not None:
            self._bar.total = self.total
            self._bar.set_postfix(self._info, refresh=False)
            self._bar.update(n)
        elif time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._line()

    def close(self, *, finished: bool = True) -> None:
        """Ends it. With ``at_most``, units that are left of finished work need not be done."""
        outcome = self.outcome
        if outcome is None and finished and self.at_most and self.total and self.done < self.total:
            outcome = "stopped early, as no more are needed"
        if self._bar is not None:
            self._bar.close()
            if outcome is not None:
                print(f"{self.label}: {outcome}", file=self.file, flush=True)
        elif self._said is not None and (
            outcome or self._said != self.done
        ):  # something was said: say the end
            self._line(outcome)

    @property
    def said(self) -> bool:
        """Whether anything was shown; short work shows nothing without a terminal."""
        return self._bar is not None or self._said is not None

    def _line(self, outcome: str | None = None) -> None:
        self._last_line, self._said = time.monotonic(), self.done
        rate = self.rate
        parts = [f"{self.label}: {self.done:,}"]
        if self.total:
            parts[0] += f"/{self.total:,} ({self.done / self.total:.0%})"
        parts[0] += f" {self.unit}"
        parts.append(speed(rate))
        if outcome is not None:
            parts.append(outcome)
        elif self.total and rate > 0:
            parts.append(f"{self.at_most}{duration((self.total - self.done) / rate)} left")
        parts += [f"{name} {value}" for name, value in self._info.items()]
        print(", ".join(parts), file=self.file, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.close(finished=kind is None)


def counted(n: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "shard"), counted(1200, "shard")
    ('1 shard', '1,200 shards')
    """
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def speed(rate: float) -> str:
    """A rate for people: units per second, slow ones per minute.

    >>> speed(1234.56), speed(0.25)
    ('1,234.6/s', '15.0/min')
    """
    return f"{rate:,.1f}/s" if rate >= 1 else f"{60 * rate:.1f}/min"


def duration(seconds: float) -> str:
    """A duration for people.

    >>> duration(7), duration(200), duration(7300)
    ('7s', '3m 20s', '2h 01m')
    """
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    return f"{seconds // 3600}h {seconds % 3600 // 60:02d}m"


def log_folder() -> str | None:
    """The folder for event files; None means the logger alone. ``cluster.runtime`` replaces this function."""
    return None


def event(message: str, *, run: str = "", stage: str = "", shard: str = "", **more: Any) -> None:
    """Writes one event; never raises for a log folder that is full or gone."""
    fields = {
        "time": round(time.time(), 3),
        "event": message,
        "run": run,
        "stage": stage,
        "shard": shard,
    } | more
    line = json.dumps({name: value for name, value in fields.items() if value != ""}, default=str)
    logger.debug("%s", line)
    try:
        path = _path()
        if path is not None:
            _sink(path).write(line + "\n")
    except OSError as error:
        logger.warning("event not written: %s", error)


@lru_cache(maxsize=1)
def _sink(path: str) -> IO[str]:
    """An event file, line buffered, open as long as it is the one written to."""
    return open(path, "a", buffering=1)


def _path() -> str | None:
    """The event file of this process; None while there is no folder."""
    folder = log_folder()
    return os.path.join(folder, f"hashnet-{os.getpid()}.jsonl") if folder else None
