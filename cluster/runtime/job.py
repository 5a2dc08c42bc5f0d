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

from cluster.runtime import connection
from cluster.runtime.errors import OUT_OF_MEMORY_ADVICE, hashnet_error_in
from hashnet.errors import ConfigError, HashnetError
from hashnet.io import config, storage

C = TypeVar("C")
OUT_OF_MEMORY = "node running low on memory"  # part of Ray's own message
OUTPUTS = ("run", "out", "query_codes")  # keys of any job that name an output
RECORDED = ("pairs", "weights")  # inputs whose path a run records, and compares when it is resumed
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray's job supervisor sets a variable of this name


def run_job(cls: type[C], function: Callable[[C], dict[str, Any]], argv: list[str] | None = None) -> NoReturn:
    """Runs ``function`` on the configuration that the command line describes, then exits."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_AboveProgressBar()])
    for noisy in ("ray", "httpx", "numba", "matplotlib", "botocore", "faiss"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, _terminated)  # `ray job stop`, a shutdown, a spot node that is reclaimed
    try:
        settings = read_settings(cls, sys.argv[1:] if argv is None else argv)
        result = function(settings)
        changes = connection.node_changes()
        if changes is not None:
            result = {**result, "cluster": changes.to_dict()}
    except KeyboardInterrupt:
        _stop("stopped; run the same command again to continue", 130)
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


def _explain(error: BaseException) -> tuple[str, int]:
    """A message and an exit code: one sentence for a HashnetError, also for one that crossed Ray."""
    known = hashnet_error_in(error)
    if known is not None:
        return f"error: {_plain(known)}", known.exit_code
    whole = "".join(traceback.format_exception(error))
    if OUT_OF_MEMORY in whole:
        return f"error: {OUT_OF_MEMORY_ADVICE}", 1
    return f"{whole}\nfailed: {type(error).__name__}", 1


def _plain(error: HashnetError) -> str:
    """The message alone: the text of an error that crossed Ray includes the remote stack trace."""
    return str(error.args[0]) if error.args else str(error)


def _stop(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    _leave_ray()
    raise SystemExit(code)


def _leave_ray() -> None:
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
