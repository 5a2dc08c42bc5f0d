"""The settings of a server, and the limits every request must keep."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from hashnet.errors import ConfigError
from hashnet.io import REQUIRED, Renamed, key

NO_MODEL = "off"


def _check_not_auto(value: str) -> None:
    if value == "auto":
        raise ValueError("auto is now none, which is the default: leave the key out")


@dataclass(frozen=True)
class ServeConfig:
    """The keys of ``jobs/serve.py``."""

    RENAMED: ClassVar = {"engine": Renamed("search_engine"), "encoder_device": Renamed("device")}

    run: str = key(
        REQUIRED, "run folder with index/ and, where they exist, codes/, model/, manifest.parquet", path=True
    )
    host: str = key("127.0.0.1", "address to listen on; any other than loopback needs HASHNET_TOKEN")
    port: int = key(8000, "port to listen on", low=1, high=65_535)
    model: str | None = key(
        None,
        "model bundle; none: RUN/model where it exists; off: search by codes and ids only",
        path=(NO_MODEL,),
        check=_check_not_auto,
    )
    index: str | None = key(None, "index folder; none: RUN/index", path=True, check=_check_not_auto)
    codes: str | None = key(
        None, "code store of the items; none: RUN/codes where it exists", path=True, check=_check_not_auto
    )
    base_uri: str | None = key(None, "folder that relative picture paths start from", path=True)
    search_engine: str = key("auto", "engine of exact search", choices=("auto", "faiss", "kernel"))
    index_device: str = key("cpu", "where a flat index is kept", choices=("cpu", "cuda"))
    device: str = key(
        "auto", "where the model runs; auto: a GPU where the cluster has one", choices=("auto", "cpu", "cuda")
    )
    http_replicas: int = key(1, "HTTP processes", low=1, high=100)
    index_replicas: int = key(1, "processes that hold the index", low=1, high=1000)
    max_index_replicas: int | None = key(
        None, "let their number grow up to this under load; none: fixed", low=1, high=1000
    )
    encoder_replicas: int = key(1, "processes that hold the model", low=1, high=1000)
    max_encoder_replicas: int | None = key(
        None, "let their number grow up to this under load; none: fixed", low=1, high=1000
    )
    threads: int | None = key(
        None, "threads of one index or encoder process; none: all cores of its machine", low=1
    )
    follow_s: float = key(1.0, "seconds between two looks for a new index version", low=0.05)
    max_body_mb: float = key(32.0, "largest request body", low=0.01)
    max_pixels: int = key(50_000_000, "largest picture that is decoded, width x height", low=1)
    max_k: int = key(1000, "largest k", low=1)
    max_radius: int = key(16, "largest radius", low=0)
    max_batch: int = key(4096, "most queries in one request", low=1)
    max_hits: int = key(4_000_000, "most hits in one response", low=1)
    max_inflight: int = key(256, "most requests in flight in one HTTP process; more get 429", low=1)
    timeout_s: float = key(20.0, "longest time one request may take", low=0.1)
    tls_cert: str | None = key(None, "certificate chain (PEM) for HTTPS", path=True)
    tls_key: str | None = key(None, "its private key (PEM)", path=True)

    def __post_init__(self) -> None:
        mistakes = []
        for kind in ("index", "encoder"):
            least, most = getattr(self, f"{kind}_replicas"), getattr(self, f"max_{kind}_replicas")
            if most is not None and most < least:
                mistakes.append(f"max_{kind}_replicas={most} is below {kind}_replicas={least}")
        if bool(self.tls_cert) != bool(self.tls_key):
            mistakes.append("tls_cert and tls_key belong together; give both or neither")
        if mistakes:
            raise ConfigError(mistakes)

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 1_000_000)

    @property
    def limits(self) -> Limits:
        return Limits(**{field.name: getattr(self, field.name) for field in fields(Limits)})

    @property
    def address(self) -> str:
        """The host as Serve is given and reports it."""
        return "127.0.0.1" if self.host == "localhost" else self.host

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls_cert else ''}://{host}:{self.port}"


@dataclass(frozen=True)
class Limits:
    """The limits of one request: keys of ServeConfig, which has their defaults and meanings."""

    max_body_bytes: int
    max_pixels: int
    max_k: int
    max_radius: int
    max_batch: int
    max_hits: int
    max_inflight: int
    timeout_s: float
