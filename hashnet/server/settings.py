"""ServeConfig: the settings of a server. Limits: of each request. ServedRun: the artefacts of the run.

Access: who may do what, by the read and the write token, and the host names a local server responds to.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from hashnet.errors import ConfigError, HashnetError, LineageMismatch
from hashnet.io import REQUIRED, Renamed, key
from hashnet.run import Run

if TYPE_CHECKING:
    from hashnet.store import CodeStore, ItemLookup

NO_MODEL = "off"


def _check_not_auto(value: str) -> None:
    if value == "auto":
        raise ValueError("auto is now none, which is the default: leave the key out")


@dataclass(frozen=True)
class ServeConfig:
    """The keys of ``jobs/serve.py`` and ``hashnet serve``."""

    RENAMED: ClassVar = {
        "engine": Renamed("search_engine"),
        "encoder_device": Renamed("device"),
        "http_replicas": Renamed("replicas"),
        "index_replicas": Renamed("replicas"),
    }

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
    verify: bool = key(True, "check the sha256 of model, codes and manifest before starting")
    search_engine: str = key("auto", "engine of exact search", choices=("auto", "faiss", "kernel"))
    index_device: str = key("cpu", "where a flat index is kept", choices=("cpu", "cuda"))
    device: str = key(
        "auto", "where the model runs; auto: a GPU where the cluster has one", choices=("auto", "cpu", "cuda")
    )
    replicas: int = key(1, "processes that respond to requests, each with the whole index", low=1, high=1000)
    slices: int | None = key(
        None, "on Ray: spread the index over this many processes; none: each HTTP process has it all", low=1
    )
    slice_replicas: int = key(1, "processes per slice", low=1, high=1000)
    encoder_replicas: int = key(1, "processes that hold the model", low=1, high=1000)
    max_encoder_replicas: int | None = key(
        None, "let their number grow to this under load; none: fixed", low=1, high=1000
    )
    threads: int | None = key(None, "threads of one process; none: all cores of its machine", low=1)
    follow_s: float = key(1.0, "seconds between checks for a new index version", low=0.05)
    max_body_mb: float = key(32.0, "largest request body", low=0.01)
    max_pixels: int = key(50_000_000, "largest picture that is decoded, width x height", low=1)
    max_k: int = key(1000, "largest k", low=1)
    max_radius: int = key(16, "largest radius", low=0)
    max_batch: int = key(4096, "most queries in one request", low=1)
    max_hits: int = key(4_000_000, "most hits in one response", low=1)
    max_inflight: int = key(256, "most requests in flight in one process; more get 429", low=1)
    timeout_s: float = key(20.0, "longest time one request may take", low=0.1)
    tls_cert: str | None = key(None, "certificate chain (PEM) for HTTPS", path=True)
    tls_key: str | None = key(None, "its private key (PEM)", path=True)
    log_dir: str | None = key(
        None, "hashnet serve: folder of the request log; none: a new temporary one", path=True
    )

    def __post_init__(self) -> None:
        mistakes = []
        least, most = self.encoder_replicas, self.max_encoder_replicas
        if most is not None and most < least:
            mistakes.append(f"max_encoder_replicas={most} is below encoder_replicas={least}")
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
        """The host as an address."""
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


@dataclass(frozen=True)
class ServedRun:
    """Where the artefacts are, and what does not change while they are served."""

    index: str
    model: str | None
    codes: str | None
    manifest: str | None
    base_uri: str | None
    model_sha256: str | None
    n_bits: int
    size: int  # codes in the index when the server starts
    kind: str  # of the index
    modality: str | None = None  # what the model takes: image or features; None without a model
    n_features: int | None = None
    class_names: list[str] | None = None
    pictures: bool = False  # whether items have thumbnails

    @property
    def accepts(self) -> list[str]:
        """The kinds of queries that can be searched for."""
        encoded = {None: [], "image": ["images"], "features": ["features"]}[self.modality]
        return ["codes", "ids", "keys", *encoded]

    @classmethod
    def open(cls, config: ServeConfig) -> ServedRun:
        """Opens every artefact of the run; refuses damaged ones, and those not made for each other.

        The index is verified by the process that loads it.
        """
        model_uri = None if config.model == NO_MODEL else config.model
        run = Run(config.run, index=config.index, codes=config.codes, model=model_uri)
        if config.index is None:
            run.check_folder()
        about = run.index.read() if config.slices is None or run.index.exists() else _sliced(run)
        sha256 = modality = n_features = class_names = None
        has_model = config.model != NO_MODEL and (config.model is not None or run.model.begun())
        if has_model:
            if config.verify:
                run.model.check()
            info = run.model.info()
            sha256, modality, n_features = info.sha256, info.modality, info.n_features
            class_names = info.class_names
            check_model(about["lineage"], sha256, run.index.uri)
        # one that is not finished is refused
        has_codes = config.codes is not None or run.codes.begun() or run.codes.exists()
        if has_codes:
            if config.verify:
                run.codes.check()
            store = run.codes.open()
            _check_codes(store, about, run.index.uri)
            class_names = list(store.class_names) if store.class_names is not None else class_names
        pictures, has_manifest = False, run.manifest.begun()
        if has_manifest:
            if config.verify:
                run.manifest.check()
            manifest = run.manifest.open(verify=False)
            pictures = manifest.modality == "image" and has_codes
            class_names = list(manifest.class_names) if manifest.class_names is not None else class_names
        return cls(
            index=run.index.uri,
            model=run.model.uri if has_model else None,
            codes=run.codes.uri if has_codes else None,
            manifest=run.manifest.uri if has_manifest else None,
            base_uri=config.base_uri,
            model_sha256=sha256,
            n_bits=about["n_bits"],
            size=about["rows"],
            kind=about["index_kind"],
            modality=modality,
            n_features=n_features,
            class_names=class_names,
            pictures=pictures,
        )

    def open_items(self) -> ItemLookup | None:
        """The items by id; None for an index without a code store."""
        if self.codes is None:
            return None
        from hashnet.data import Manifest
        from hashnet.store import CodeStore, ItemLookup

        # ``open`` has verified the parts; here pictures are looked up one by one.
        manifest = Manifest.open(self.manifest, verify=False) if self.manifest else None
        return ItemLookup(CodeStore.open(self.codes), manifest, self.base_uri)


def _sliced(run: Run) -> dict[str, Any]:
    """What the header of an index would say that exists in slices only, which are built from the codes."""
    store = run.codes.open()
    return {"n_bits": store.n_bits, "rows": len(store), "index_kind": "flat", "lineage": store.lineage}


def check_model(lineage: dict[str, Any], model_sha256: str | None, uri: str) -> None:
    """LineageMismatch with both hashes unless the index was made with this model (None: there is none)."""
    if model_sha256 is None:
        return
    made_with = lineage.get("model_sha256")
    if made_with is None:
        raise LineageMismatch(
            f"{uri} does not say which model made its codes, the encoder's model is {model_sha256}; "
            f"build the index from a code store of that model, or serve with model={NO_MODEL}"
        )
    if made_with != model_sha256:
        raise LineageMismatch(
            f"{uri} was made with model {made_with}, the encoder's model is {model_sha256}: queries would be "
            "compared with codes of another model; encode the database and build the index with this one, "
            "or serve the model it was made with"
        )


def _check_codes(store: CodeStore, about: dict[str, Any], index: str) -> None:
    """The code store must be of the model the index was made with, or items would be described wrongly."""
    if store.n_bits != about["n_bits"]:
        raise ConfigError(
            f"{store.uri} has {store.n_bits} bits, {index} has {about['n_bits']}: build the index again"
        )
    of_codes, of_index = store.lineage.get("model_sha256"), about["lineage"].get("model_sha256")
    if of_codes is not None and of_index is not None and of_codes != of_index:
        raise LineageMismatch(
            f"{store.uri} was made with model {of_codes}, {index} with {of_index}: "
            "build the index from these codes"
        )


# ---------------------------------------------------------------- tokens and host names
READ_TOKEN, WRITE_TOKEN = "HASHNET_TOKEN", "HASHNET_WRITE_TOKEN"


@dataclass(frozen=True)
class Access:
    """sha256 digests of the tokens, "" for none. The tokens themselves stay in the launcher.

    ``local_only``: a server on loopback without a read token responds to local host names alone, so
    that a web page from elsewhere cannot reach it through a name it controls (DNS rebinding).
    """

    read: str = ""
    write: str = ""
    local_only: bool = True

    @classmethod
    def of(cls, read: str = "", write: str = "", *, local_only: bool = True) -> Access:
        """The rules for these tokens."""
        return cls(_digest(read), _digest(write), local_only)

    @classmethod
    def from_environment(cls, host: str) -> Access:
        """The rules for the tokens of the environment; refuses to listen on ``host`` without one."""
        read, write = (os.environ.get(name, "").strip() for name in (READ_TOKEN, WRITE_TOKEN))
        mistakes = []
        if not is_loopback(host) and not read:
            mistakes.append(
                f"host={host} is reachable from other machines: set {READ_TOKEN} to a long random text "
                "(clients send it as a bearer token), or listen on host=127.0.0.1"
            )
        if read and read == write:
            mistakes.append(
                f"{READ_TOKEN} and {WRITE_TOKEN} are the same; readers could write: make them differ"
            )
        for name, value in ((READ_TOKEN, read), (WRITE_TOKEN, write)):
            if value and len(value) < 16:
                mistakes.append(
                    f"{name} has {len(value)} characters; use at least 16, for example openssl rand -hex 24"
                )
        if mistakes:
            raise ConfigError(mistakes)
        return cls.of(read, write, local_only=is_loopback(host) and not read)

    def check_host(self, host: str) -> None:
        """Refuses a Host header that is not a local name, where only those are served."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if self.local_only and not is_loopback(name.strip("[]").lower()):
            raise _refusal("wrong_host", "this server responds only to its local name", 421)

    def check_token(self, authorization: str, write: bool) -> None:
        """Refuses an Authorization header that does not allow reading or, with ``write``, writing."""
        scheme, _, token = authorization.partition(" ")
        given = _digest(token.strip()) if scheme.lower() == "bearer" else ""
        may_write = bool(self.write) and hmac.compare_digest(given, self.write)
        if write:
            if not self.write:
                raise _refusal(
                    "writes_off", f"this server was started without a write token ({WRITE_TOKEN})", 403
                )
            if not may_write:
                status = 403 if given else 401
                raise _refusal("write_token_needed", "adding and removing need the write token", status)
        elif self.read and not (hmac.compare_digest(given, self.read) or may_write):
            raise _refusal("unauthorized", "send the token as: Authorization: Bearer TOKEN", 401)


@lru_cache(maxsize=100)
def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refusal(code: str, message: str, status: int) -> HashnetError:
    from hashnet.server.schemas import ApiError  # heavy: what starts a server does without

    return ApiError(code, message, status)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest() if token else ""
