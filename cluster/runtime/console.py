"""What a job shows and what it only records: its own words on the terminal, everything else in a log file.

Ray writes much to standard error: warnings of its C++ parts, lines of other processes, stack traces of
workers. In a job these go to a log file, whose place is printed where the job fails. And Ray may end the
process it runs in, as when its raylet is gone: so a job runs in a child process, and its parent, which does
nothing else, still says what happened in one sentence.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn

PR_SET_PDEATHSIG = 1  # of Linux' prctl: a signal for the child whose parent has died
GCS_LOST = ("Failed to connect to GCS", "GCS client", "gcs_rpc_client", "Check failed: gcs")
TAIL = 20_000  # characters of a log: what happened last
FORWARDED = (signal.SIGINT, signal.SIGTERM)
AGAIN = "run the same command again to continue"

_log: IO[str] | None = None  # of this process, where it has one
_explained: int | None = None  # the end of a pipe: a byte there says that the failure was explained


def supervise(main: Callable[[], NoReturn]) -> NoReturn:
    """Runs ``main`` in a child process with a log file; exits as it does."""
    if threading.active_count() > 1 or not hasattr(os, "fork"):  # a fork would copy this thread alone
        main()
    log, name = tempfile.mkstemp(prefix=f"hashnet-{Path(sys.argv[0]).stem}-", suffix=".log")
    os.close(log)
    path = Path(name)
    explained, child_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until the parent can forward them
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(explained)
        _become_child(path, child_end)
        main()
    os.close(child_end)
    for number in FORWARDED:
        signal.signal(number, lambda received, _: _forward(child, received))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code and not os.read(explained, 1):
        print(f"error: {_why(code, path)}\ndetails: {path}", file=sys.stderr, flush=True)
    elif code in (0, 2, 130):  # done, a mistake in the input, or stopped: nothing to look up
        path.unlink(missing_ok=True)
    raise SystemExit(code if code >= 0 else 1)


def _become_child(path: Path, explained: int) -> None:
    """Makes the log file this process's standard error; Python's own ``sys.stderr`` stays the terminal."""
    global _log, _explained
    os.setpgid(0, 0)  # Ctrl-C reaches the parent alone, which passes it on once
    with contextlib.suppress(OSError, AttributeError):  # where there is no prctl
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    terminal = os.dup(2)
    os.set_inheritable(terminal, False)
    lines = {"mode": "w", "buffering": 1, "encoding": "utf-8", "errors": "replace"}
    sys.stderr = open(terminal, **lines)  # noqa: SIM115 - both stay open as long as the process
    _log, _explained = open(path, **lines), explained  # noqa: SIM115
    os.dup2(_log.fileno(), 2)


def _forward(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def _why(code: int, path: Path) -> str:
    """One sentence on a child that ended without a word, from how it ended and from the end of its log."""
    tail = path.read_text(errors="replace")[-TAIL:] if path.exists() else ""
    if code == -signal.SIGKILL:
        return f"the job was killed, perhaps because the machine ran out of memory; {AGAIN}"
    if any(mark in tail for mark in GCS_LOST):
        return f"the head of the Ray cluster does not answer; see that it is up (`ray status`), then {AGAIN}"
    if "raylet" in tail.lower():
        return f"Ray on this machine stopped (its raylet died); {AGAIN}"
    how = f"with exit code {code}" if code > 0 else f"by {signal.Signals(-code).name}"
    return f"the job was ended {how}; {AGAIN}"


def log_stream() -> IO[str] | None:
    """The log file of this job; None outside of one."""
    return _log


def log_path() -> str | None:
    """Where the log file of this job is; None outside of one."""
    return _log.name if _log is not None else None


def record(text: str) -> bool:
    """Writes to the log file; False where there is none."""
    if _log is None:
        return False
    _log.write(f"{time.strftime('%H:%M:%S')} {text.rstrip()}\n")
    return True


def explain(sentence: str) -> None:
    """Prints why the job fails; nobody else will."""
    print(sentence, file=sys.stderr, flush=True)
    if _explained is not None:
        os.write(_explained, b".")
