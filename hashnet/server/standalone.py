"""``hashnet serve``: the whole server on one machine, without Ray.

    supervisor ─┬─▶ worker(s)   the HTTP application with the memory-mapped index, all on one listening socket
                └─▶ encoder     the model; workers reach it through a Unix socket

The supervisor imports next to nothing. It starts the others, replaces one that dies, and ends them. A child
reports on a pipe that it is up, or why it is not, and ends when the supervisor is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hashnet.errors import ConfigError, HashnetError
from hashnet.io import config as configs
from hashnet.io import events
from hashnet.server.settings import READ_TOKEN, WRITE_TOKEN, Access, ServeConfig, ServedRun

if TYPE_CHECKING:
    from hashnet.server.live_index import LiveIndex

GRACE_S = 8.0  # for children to end by themselves
RESTART_S = (0.0, 0.5, 5.0)  # before the first, second and any further restart of a child that dies young
YOUNG_S = 10.0
SOCKET, LOCK, METRICS = "encoder.sock", "writer.lock", "metrics"  # in the log folder
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
# Imported by pyarrow and numba wherever they are installed: a third of a start.
NOT_NEEDED = ("pandas", "scipy", "cffi")


def listen(host: str, port: int, *, shared: bool = False, option: str = "port=") -> socket.socket:
    """A listening socket; ``shared`` ones of several processes on one port share its connections.

    ``option`` is how a user chooses the port, for the error.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        other = port + 1 if port < 65_535 else 8000
        reason = f"port {port} is in use on {host} ({error.strerror}); choose another: {option}{other}"
        raise ConfigError(reason) from error
    sock.listen(2048)
    return sock


@dataclass
class Child:
    """A worker or the encoder: its process and the pipe it reports on."""

    role: str  # worker | encoder
    process: subprocess.Popen | None = None
    reports: int = -1  # the pipe, not blocking
    started: float = 0.0
    deaths: int = 0  # in a row, each soon after its start
    was_up: bool = False  # whether it, or one before it, has been
    report: dict[str, Any] = field(default_factory=dict)  # {} while it is starting


class Supervisor:
    """Starts a server's processes, replaces those that die, and ends them."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.access = Access.from_environment(config.host)
        self.socket = listen(config.address, config.port, option="--port ")
        self.folder = config.log_dir or tempfile.mkdtemp(prefix=f"hashnet-serve-{config.port}-")
        os.makedirs(os.path.join(self.folder, METRICS), mode=0o700, exist_ok=True)
        self.children = [Child("worker") for _ in range(config.replicas)] + [Child("encoder")]

    def start(self) -> None:
        """Starts every child; returns when all workers accept requests. The model may be loading still."""
        for child in self.children:
            self._start(child)
        while not all(child.report for child in self.children if child.role == "worker"):
            time.sleep(0.02)
            self.look_after(restart=False)

    def look_after(self, restart: bool = True) -> None:
        """Reads reports and replaces children that died; raises what kept one from starting at all.

        One that cannot start in place of one that died is tried again: the others serve.
        """
        for child in self.children:
            if child.process is None:
                continue
            self._read_report(child)
            child.was_up |= bool(child.report) and "error" not in child.report
            if "error" in child.report and not child.was_up:
                error = HashnetError(child.report["error"])
                error.exit_code = child.report["exit_code"]
                raise error
            code = child.process.poll()
            if code is None:
                continue
            if child.report.get("no_model"):
                child.process = None
            elif not restart:
                raise HashnetError(f"the {child.role} process ended with code {code} while it was starting")
            elif time.monotonic() >= child.started + self._pause(child):
                events.event(
                    "process replaced", role=child.role, exit_code=code, error=child.report.get("error", "")
                )
                self._start(child)

    def stop(self) -> None:
        """Ends the children after the requests in flight; kills those that do not end."""
        alive = [child.process for child in self.children if child.process is not None]
        for process in alive:
            process.terminate()
        until = time.monotonic() + GRACE_S
        for process in alive:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.socket.close()

    def _pause(self, child: Child) -> float:
        lived = time.monotonic() - child.started
        if not child.deaths and lived > YOUNG_S:
            return 0.0
        return RESTART_S[min(child.deaths, len(RESTART_S) - 1)]

    def _start(self, child: Child) -> None:
        old = time.monotonic() - child.started > YOUNG_S
        child.deaths = 0 if old or not child.started else child.deaths + 1
        reports, writer = os.pipe()
        os.set_blocking(reports, False)
        if child.reports >= 0:
            os.close(child.reports)
        # The first worker verifies the artefacts, once; the others, and later ones, rely on it.
        verify = self.config.verify and child is self.children[0] and not child.started
        task = {
            "config": configs.to_dict(replace(self.config, verify=verify)),
            "access": asdict(self.access),
            "folder": self.folder,
            "socket": self.socket.fileno(),
            "reports": writer,
        }
        shared = (writer, self.socket.fileno()) if child.role == "worker" else (writer,)
        child.process = subprocess.Popen(
            [sys.executable, "-m", "hashnet.server.standalone", child.role],
            stdin=subprocess.PIPE,
            bufsize=0,
            pass_fds=shared,
            env=self._environment(child.role),
            start_new_session=True,  # the supervisor passes Ctrl-C on
        )
        os.close(writer)
        assert child.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # killed already: it is replaced like any other
            child.process.stdin.write(json.dumps(task).encode() + b"\n")  # left open: a child ends with it
        child.reports, child.started, child.report = reports, time.monotonic(), {}

    def _environment(self, role: str) -> dict[str, str]:
        """The environment of a child: without tokens, whose digests are enough, and with its threads."""
        cores = len(os.sched_getaffinity(0))
        threads = self.config.threads or (
            cores if role == "encoder" else max(1, cores // self.config.replicas)
        )
        kept = {name: value for name, value in os.environ.items() if name not in (READ_TOKEN, WRITE_TOKEN)}
        kept |= dict.fromkeys(THREADS, str(threads))
        if role == "worker" and self.config.replicas > 1:
            kept["PROMETHEUS_MULTIPROC_DIR"] = os.path.join(self.folder, METRICS)
        return kept

    @staticmethod
    def _read_report(child: Child) -> None:
        try:
            data = os.read(child.reports, 1 << 16) if not child.report else b""
        except BlockingIOError:
            return
        if data:
            child.report = json.loads(data)


def serve_standalone(config: ServeConfig, when_up: Callable[[str], object] = lambda url: None) -> int:
    """Serves until interrupted; returns the exit code. ``when_up`` gets the page's address."""
    for package in ("uvicorn", "uvloop", "httptools"):  # report what is missing before starting anything
        importlib.import_module(package)

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    supervisor = Supervisor(config)
    events.log_folder = lambda: supervisor.folder
    try:
        supervisor.start()
        worker = next(child for child in supervisor.children if child.role == "worker")
        print(worker.report["welcome"], file=sys.stderr, flush=True)
        when_up(f"{config.url}/")
        while True:
            time.sleep(0.1)
            supervisor.look_after()
    except KeyboardInterrupt:
        print("stopping …", file=sys.stderr, flush=True)
        return 0
    finally:
        supervisor.stop()


# ---------------------------------------------------------------- inside a child


def welcome(
    config: ServeConfig, served: ServedRun, access: Access, log: str, index: LiveIndex | None = None
) -> str:
    """What a person should know when the server is up; ``log`` is where its log is."""
    url = config.url
    accepts = {"image": "pictures, ", "features": "features, "}.get(served.modality or "", "")
    token = ' -H "authorization: Bearer $HASHNET_TOKEN"' if access.read else ""
    items = served.open_items()
    id_ = next(iter(items.sample(1) if items is not None else []), 0)
    key = None if index is None else index.key_of(id_)
    lines = [
        f"serving {served.size:,} codes of {served.n_bits} bits ({served.kind}): "
        f"search by {accepts}{'codes and ids' if key is None else 'codes, ids and keys'}",
        f"  {url}/",
        "try",
        f"  curl{token} {url}/v1/info",
    ]
    if served.modality == "image":
        lines.append(f"  hashnet query PICTURE --url {url} -k 10")
    lines.append(f"  hashnet query --id {id_} --url {url}")
    if key is not None:
        lines.append(f"  hashnet query --key {shlex.quote(key)} --url {url}")
    lines += [
        f"writing is {'on' if access.write else 'off (set HASHNET_WRITE_TOKEN to turn it on)'}",
        f"requests and errors are logged in {log}",
        "Ctrl-C stops it",
    ]
    return "\n".join(lines)


class FileLock:
    """Held by one process at a time; the system lets go of it when its holder dies."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None:
        self._file = open(self.path, "a")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *exc: object) -> None:
        self._file.close()


async def _work(config: ServeConfig, access: Access, folder: str, fd: int, report: Any) -> None:
    """A worker: the HTTP application over the index."""
    from hashnet.server.app import Backend, build_app
    from hashnet.server.encoder import EncoderProcess
    from hashnet.server.http_server import HttpServer, Telemetry
    from hashnet.server.live_index import IndexService, LiveIndex
    from hashnet.server.writer import IndexWriter

    served = ServedRun.open(config)
    telemetry = Telemetry()
    live = LiveIndex(served.index, config.search_engine, config.index_device, served.model_sha256)
    index = IndexService(live, config.follow_s, telemetry)
    writer = IndexWriter(
        served.index, model_sha256=served.model_sha256, lock=FileLock(os.path.join(folder, LOCK))
    )
    model = EncoderProcess(os.path.join(folder, SOCKET)) if served.model is not None else None
    backend = Backend(served, index, model, writer.write, config.timeout_s)
    app = build_app(backend, config.limits, access, telemetry)
    text = welcome(config, served, access, folder, live)
    server = HttpServer(app, config, when_up=lambda: report(welcome=text))
    _when_orphaned(lambda: setattr(server, "should_exit", True))
    await server.serve([socket.socket(fileno=fd)])


async def _encode(config: ServeConfig, folder: str, report: Any) -> None:
    """The encoder: the model behind a Unix socket."""
    from hashnet.server.encoder import BatchEncoder, serve_encoder

    served = ServedRun.open(config)
    if served.model is None:
        report(no_model=True)
        return
    threads = int(os.environ[THREADS[0]])
    encoder = BatchEncoder(served.model, config.device, config.max_pixels, threads)
    path = os.path.join(folder, SOCKET)
    if os.path.exists(path):
        os.unlink(path)  # of an encoder that died
    task = asyncio.create_task(serve_encoder(encoder, path))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    _when_orphaned(task.cancel)
    report(ready=True)
    try:
        await task
    except asyncio.CancelledError:
        return


def _when_orphaned(act: Any) -> None:
    """Calls ``act`` when the supervisor is gone: its end of stdin closes."""
    loop = asyncio.get_running_loop()

    def closed() -> None:
        loop.remove_reader(0)
        act()

    loop.add_reader(0, closed)


class _NotNeeded:
    """Hides the modules NOT_NEEDED, as if they were not installed."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name in NOT_NEEDED:
            raise ModuleNotFoundError(f"a worker does without {name}", name=name)


def main(role: str) -> int:
    """A child of the supervisor; its task comes on the first line of stdin."""
    if role == "worker":
        sys.meta_path.insert(0, _NotNeeded)  # type: ignore[arg-type]
    task = json.loads(sys.stdin.buffer.raw.readline())  # type: ignore[union-attr]
    pipe, folder = task["reports"], task["folder"]

    def report(**facts: Any) -> None:
        os.write(pipe, json.dumps(facts).encode())

    events.log_folder = lambda: folder
    config = configs.from_dict(ServeConfig, task["config"])
    import uvloop

    try:
        if role == "encoder":
            uvloop.run(_encode(config, folder, report))
        else:
            uvloop.run(_work(config, Access(**task["access"]), folder, task["socket"], report))
    except HashnetError as error:
        report(error=str(error), exit_code=error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
