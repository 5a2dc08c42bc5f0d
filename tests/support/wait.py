"""Waiting for a condition, however loaded the machine is: a test never sleeps for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(true: Callable[[], Any], timeout_s: float = 180.0) -> None:
    """Returns as soon as it is true; fails when it does not become so."""
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until, f"not within {timeout_s:g} s"
        time.sleep(0.05)
