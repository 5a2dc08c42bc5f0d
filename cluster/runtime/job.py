"""What every job does around its one call: read the settings, run, print the result, set the exit code.

    python jobs/NAME.py [--config FILE] [key=value …]

Exit code 0: done. 1: it ran and failed. 2: a mistake in the input, explained in a sentence. The last
line of standard output is one JSON object; everything else goes to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from cluster.runtime import connection, console
from cluster.runtime.console import AGAIN
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
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray's job supervisor sets a variable of this name


def run_job(cls: type[C], function: Callable[[C], dict[str, Any]], argv: list[str] | None = None) -> NoReturn:
    """Runs ``function`` on the configuration that the command line describes, then exits.

    The command line is ``argv``, in this process; or that of the process, in a child with a log file.
    """
    if argv is None:
        console.supervise(lambda: run_job(cls, function, sys.argv[1:]))
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
    elif console.log_path() is None:  # nowhere else to look it up
        return f"{whole}\nfailed: {type(error).__name__}", 1
    else:
        sentence = f"{type(error).__name__}: {_first_line(error)}"
    if known is None:
        console.record(whole)
    details = f"\ndetails: {path}" if (path := console.log_path()) else ""
    return f"error: {sentence}{details}", known.exit_code if known is not None else 1


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _plain(error: HashnetError) -> str:
    """The message alone: the text of an error that crossed Ray includes the remote stack trace."""
    return str(error.args[0]) if error.args else str(error)


def _stop(message: str, code: int) -> NoReturn:
    console.explain(message)
    _leave_ray()
    raise SystemExit(code)


def _leave_ray() -> None:
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
