"""What every job does around its one call: read the settings, run, print the result, set the exit code.

    python jobs/NAME.py [--config FILE] [key=value …]

Exit code 0: done. 1: it ran and failed. 2: a mistake in the input, explained in a sentence. The last
line of standard output is one JSON object; everything else goes to standard error.

Ray writes much there: warnings of its C++ parts, lines of other processes, stack traces of workers. In a job
these go to a log file, whose place is printed where the job fails. And Ray may end the process it runs in, as
when its raylet is gone: so a job runs in a child process, and its parent, which does nothing else, still says
what happened in one sentence.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cluster.runtime import connection
from cluster.runtime.connection import AGAIN
from cluster.runtime.ray_internals import inner_errors
from hashnet.errors import ConfigError, HashnetError
from hashnet.io import config, storage

C = TypeVar("C")
FULL_DISK, FULL_DISK_ADVICE = "No space left on device", f"; free some space there, then {AGAIN}"
OUT_OF_MEMORY = "node running low on memory"  # part of Ray's own message
NOT_UNPACKED = "Failed to set up runtime environment"  # part of Ray's own message
OUTPUTS = ("run", "out", "query_codes", "log_dir")  # keys of any job that name an output
RECORDED = ("pairs", "weights")  # inputs whose path a run records, and compares when it is resumed
RETRY_HINT = "\nFailed to apply UDF transform"  # Ray Data appends how to configure its retries
OUT_OF_MEMORY_ADVICE = (
    "Ray ended a worker because its node ran low on memory (the log says what used how much); run the "
    "same command again with less at a time (train: a smaller batch_size; encode_db: a smaller chunk_rows; "
    "compare: a larger cpus_per_cell, so that fewer run at once), or on nodes with more memory"
)
NOT_UNPACKED_ADVICE = (
    "a node could not unpack the job's files (the log says why; often its disk is full). Ray does not try "
    f"again there for ten minutes: repair the node and restart its Ray, or remove it, then {AGAIN}"
)
PR_SET_PDEATHSIG = 1  # of Linux' prctl: a signal for the child whose parent has died
GCS_LOST = ("Failed to connect to GCS", "GCS client", "gcs_rpc_client", "Check failed: gcs")
TAIL = 20_000  # characters of a log: what happened last
FORWARDED = (signal.SIGINT, signal.SIGTERM)
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray's job supervisor sets a variable of this name


def run_job(cls: type[C], function: Callable[[C], dict[str, Any]], argv: list[str] | None = None) -> NoReturn:
    """Runs ``function`` on the configuration that the command line describes, then exits.

    The command line is ``argv``, in this process; or that of the process, in a child with a log file.
    """
    if argv is None:
        _supervise(lambda: run_job(cls, function, sys.argv[1:]))
    connection.hide_gpus_of_driver()
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_AboveProgressBar()])
    for noisy in ("ray", "httpx", "numba", "matplotlib", "botocore", "faiss"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, _terminated)  # `ray job stop`, a shutdown, a spot node that is reclaimed
    try:
        settings = read_settings(cls, argv)
        result = function(settings)
        changes = connection.node_changes()
        if changes is not None:
            result = {**result, "cluster": changes.to_dict()}
    except KeyboardInterrupt:
        _stop(f"stopped; {AGAIN}", 130)
    except Exception as error:
        _stop(*_explain(error))
    _leave_ray()  # before the last line, so that the workers' last output comes first
    sys.stderr.flush()
    print(json.dumps(result, default=float), flush=True)
    raise SystemExit(0)


def _supervise(main: Callable[[], NoReturn]) -> NoReturn:
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
    os.setpgid(0, 0)  # Ctrl-C reaches the parent alone, which passes it on once
    with contextlib.suppress(OSError, AttributeError):  # where there is no prctl
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    terminal = os.dup(2)
    os.set_inheritable(terminal, False)
    lines = {"mode": "w", "buffering": 1, "encoding": "utf-8", "errors": "replace"}
    sys.stderr = open(terminal, **lines)  # noqa: SIM115 - both stay open as long as the process
    log = open(path, **lines)  # noqa: SIM115
    os.dup2(log.fileno(), 2)
    connection.log_to(log, explained)


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


class _AboveProgressBar(logging.Handler):
    """Writes log lines to standard error, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stderr)


def _terminated(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would interrupt the farewell
    raise KeyboardInterrupt


def read_settings(cls: type[C], argv: list[str]) -> C:
    """The configuration that ``argv`` describes; ``--help`` prints every key and exits."""
    words, config_file = [], None
    rest = iter(argv)
    for word in rest:
        if word in ("-h", "--help"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly
            print(_help(cls))
            raise SystemExit(0)
        if word == "--config":
            config_file = next(rest, None)
            if config_file is None:
                raise ConfigError("--config needs a file")
        elif word.startswith("--config="):
            config_file = word.partition("=")[2]
        elif word.startswith("-"):
            raise ConfigError(f"unknown flag {word}; settings are key=value, and --help lists them")
        else:
            words.append(word)
    settings = config.load(cls, config_file, words)
    if SUBMITTED in os.environ:
        _refuse_relative(settings)
    return config.with_absolute_paths(settings)


def _refuse_relative(settings: Any) -> None:
    """ConfigError for relative outputs and recorded inputs: a submitted job runs in a temporary copy of the
    working directory, elsewhere each time, so outputs there are lost and recorded paths would differ."""
    mistakes = []
    for name, path in config.paths(settings).items():
        why = "is deleted afterwards" if name in OUTPUTS else "changes each time, but the run records it"
        if name in (*OUTPUTS, *RECORDED) and not storage.is_uri(path) and not os.path.isabs(path):
            mistakes.append(
                f"{name}={path} is relative, and a submitted job's working directory {why}; give an absolute "
                f"path on storage that all nodes see ({name}=$PWD/{path}) or a URI such as s3://bucket/{path}"
            )
    if mistakes:
        raise ConfigError(mistakes)


def _help(cls: type) -> str:
    main = sys.modules["__main__"]
    purpose = (getattr(main, "__doc__", None) or "").strip()
    keys = config.describe(cls)
    return f"{purpose}\n\nKeys (key=value on the command line, key: value in --config FILE):\n{keys}"


def causes(error: BaseException) -> list[BaseException]:
    """The error and everything that Ray wrapped in it, the outermost first."""
    found: list[BaseException] = []  # Ray's causes may form a ring
    waiting = [error]
    while waiting:
        current = waiting.pop()
        found.append(current)
        waiting += [inner for inner in inner_errors(current) if inner not in found]
    return found


def hashnet_error_in(error: BaseException) -> HashnetError | None:
    """The HashnetError that ``error`` is or was caused by, as it was raised; None when there is none."""
    for current in causes(error):
        wraps = isinstance(getattr(current, "cause", None), BaseException)
        if isinstance(current, HashnetError) and not wraps:
            return current
    return None


def reraise_hashnet_error(error: BaseException) -> NoReturn:
    """Raises the HashnetError inside ``error``, or the error itself where there is none."""
    found = hashnet_error_in(error)
    if found is None or found is error:  # never from itself: a loop over its causes would not end
        raise error
    if found.args and isinstance(found.args[0], str):
        found.args = (found.args[0].partition(RETRY_HINT)[0], *found.args[1:])
    raise found from error


def _explain(error: BaseException) -> tuple[str, int]:
    """A message and an exit code: one sentence, and where its details are if there are any."""
    whole = "".join(traceback.format_exception(error))
    known = hashnet_error_in(error)
    if known is not None and known.exit_code == 2:
        return f"error: {_plain(known)}", 2
    if known is not None:
        sentence = _plain(known) + (FULL_DISK_ADVICE if FULL_DISK in str(known) else "")
    elif OUT_OF_MEMORY in whole:
        sentence = OUT_OF_MEMORY_ADVICE
    elif NOT_UNPACKED in whole:
        sentence = NOT_UNPACKED_ADVICE
    elif any(type(inner).__module__.startswith("ray.") for inner in causes(error)):
        sentence = f"Ray lost a part of the job and could not replace it ({_first_line(error)}); {AGAIN}"
    elif connection.log_path() is None:  # nowhere else to look it up
        return f"{whole}\nfailed: {type(error).__name__}", 1
    else:
        sentence = f"{type(error).__name__}: {_first_line(error)}"
    if known is None:
        connection.record(whole)
    details = f"\ndetails: {path}" if (path := connection.log_path()) else ""
    return f"error: {sentence}{details}", known.exit_code if known is not None else 1


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _plain(error: HashnetError) -> str:
    """The message alone: the text of an error that crossed Ray includes the remote stack trace."""
    return str(error.args[0]) if error.args else str(error)


def _stop(message: str, code: int) -> NoReturn:
    connection.explain(message)
    _leave_ray()
    raise SystemExit(code)


def _leave_ray() -> None:
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
