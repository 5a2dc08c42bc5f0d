"""The settings of a server, and the bounds that a request must keep."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass

from hashnet.errors import ConfigError
from hashnet.io import REQUIRED, key

READ_TOKEN, WRITE_TOKEN = "HASHNET_TOKEN", "HASHNET_WRITE_TOKEN"


@dataclass(frozen=True)
class ServeConfig:
    """What ``jobs/serve.py`` takes."""

    run: str = key(
        REQUIRED, "run folder with index/, and codes/, model/ and manifest.parquet where there are", path=True
    )
    host: str = key("127.0.0.1", "address to listen on; any other than loopback needs HASHNET_TOKEN")
    port: int = key(8000, "port to listen on", low=1, high=65_535)
    model: str = key(
        "auto", "model bundle; auto: RUN/model where it exists; none: codes and ids only", path=True
    )
    index: str = key("auto", "index folder; auto: RUN/index", path=True)
    codes: str = key("auto", "code store of the items; auto: RUN/codes where it exists", path=True)
    base_uri: str | None = key(None, "folder that relative picture paths start from", path=True)
    engine: str = key("auto", "exact search by", choices=("auto", "faiss", "kernel"))
    index_device: str = key("cpu", "where a flat index lies", choices=("cpu", "cuda"))
    encoder_device: str = key(
        "auto", "where the model runs; auto: a GPU where the cluster has one", choices=("auto", "cpu", "cuda")
    )
    http_replicas: int = key(1, "processes that speak HTTP", low=1, high=100)
    index_replicas: int = key(1, "processes that hold the index", low=1, high=1000)
    max_index_replicas: int = key(
        0, "let their number grow up to this under load; 0: fixed", low=0, high=1000
    )
    encoder_replicas: int = key(1, "processes that hold the model", low=1, high=1000)
    max_encoder_replicas: int = key(
        0, "let their number grow up to this under load; 0: fixed", low=0, high=1000
    )
    threads: int = key(0, "threads of one index or encoder process; 0: all cores of its machine", low=0)
    follow_s: float = key(1.0, "how often replicas look for a new index version", low=0.05)
    max_body_mb: float = key(32.0, "largest request body", low=0.01)
    max_pixels: int = key(50_000_000, "largest picture that is decoded, width x height", low=1)
    max_k: int = key(1000, "largest k", low=1)
    max_radius: int = key(16, "largest radius", low=0)
    max_batch: int = key(4096, "most queries in one request", low=1)
    max_hits: int = key(4_000_000, "most hits in one answer", low=1)
    max_inflight: int = key(256, "requests under way in one HTTP process; more are told to come later", low=1)
    timeout_s: float = key(20.0, "longest time one request may take", low=0.1)
    tls_cert: str = key("", "certificate chain (PEM) to speak HTTPS with", path=True)
    tls_key: str = key("", "its private key (PEM)", path=True)

    def __post_init__(self) -> None:
        mistakes = []
        for kind in ("index", "encoder"):
            least, most = getattr(self, f"{kind}_replicas"), getattr(self, f"max_{kind}_replicas")
            if most and most < least:
                mistakes.append(f"max_{kind}_replicas={most} is below {kind}_replicas={least}")
        if bool(self.tls_cert) != bool(self.tls_key):
            mistakes.append("tls_cert and tls_key belong together; give both or neither")
        if mistakes:
            raise ConfigError(mistakes)

    @property
    def limits(self) -> Limits:
        return Limits(
            max_body_bytes=int(self.max_body_mb * 1_000_000),
            max_pixels=self.max_pixels,
            max_k=self.max_k,
            max_radius=self.max_radius,
            max_batch=self.max_batch,
            max_hits=self.max_hits,
            max_inflight=self.max_inflight,
            timeout_s=self.timeout_s,
        )

    @property
    def address(self) -> str:
        """The host as Serve is given it and tells it."""
        return "127.0.0.1" if self.host == "localhost" else self.host

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls_cert else ''}://{host}:{self.port}"


@dataclass(frozen=True)
class Limits:
    """The bounds of one request."""

    max_body_bytes: int = 32_000_000
    max_pixels: int = 50_000_000
    max_k: int = 1000
    max_radius: int = 16
    max_batch: int = 4096
    max_hits: int = 4_000_000
    max_inflight: int = 256
    timeout_s: float = 20.0


@dataclass(frozen=True)
class Tokens:
    """sha256 digests of the tokens that open the server; the tokens themselves stay in the launcher."""

    read: str = ""
    write: str = ""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_tokens(host: str) -> tuple[str, str]:
    """The read and the write token of the environment; refuses to listen outwards without one."""
    read, write = (os.environ.get(name, "").strip() for name in (READ_TOKEN, WRITE_TOKEN))
    mistakes = []
    if not is_loopback(host) and not read:
        mistakes.append(
            f"host={host} is reachable from other machines: set {READ_TOKEN} to a long random text "
            "(clients send it as a bearer token), or listen on host=127.0.0.1"
        )
    if read and read == write:
        mistakes.append(f"{READ_TOKEN} and {WRITE_TOKEN} are the same; readers could write: make them differ")
    for name, value in ((READ_TOKEN, read), (WRITE_TOKEN, write)):
        if value and len(value) < 16:
            mistakes.append(
                f"{name} has {len(value)} characters; use at least 16, for example openssl rand -hex 24"
            )
    if mistakes:
        raise ConfigError(mistakes)
    return read, write
