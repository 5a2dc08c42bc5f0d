"""Every exception this project raises on purpose.

    HashnetError
    ├── ConfigError          a configuration key or value; lists every mistake it found
    ├── DataError            input data: lists, labels, manifests, pairs, features
    │   ├── BadImage         one picture that cannot be used; carries a short ``reason``
    │   └── TooManyBad       more bad rows than ``max_bad_fraction`` allows
    ├── CodeError            codes or labels of the wrong width, dtype or shape
    ├── StorageError         a path or URI that cannot be read or written
    ├── FormatError          an artefact that is incomplete, damaged, foreign or newer than this version
    ├── LineageMismatch      two artefacts that were not made for each other
    ├── ModelError           unknown backbone, weights that do not fit
    ├── DeviceMemoryError    a batch that does not fit into the GPU's memory; names its number of rows
    ├── Diverged             NaN or infinite loss; names step, beta and learning rate
    ├── IndexMismatch        a query, or an argument of a search, that does not fit the index
    │   ├── IdTaken          an id to be added that the index holds already
    │   └── StaleIndex       another process has written the index since it was read
    ├── UnknownId            an id that the index does not hold
    ├── Unsupported          an operation that this kind of index does not have
    ├── NotInstalled         a package that comes with an extra of this project
    ├── ClusterError         the cluster cannot run the job, or failed while running it
    └── ClientError          a request to the server failed
        ├── ServerUnavailable    no response, or none in time; worth trying again
        ├── RequestRejected      4xx: the request is wrong; carries ``code``
        └── ServerFailed         5xx: the server is wrong

A message names what is wrong, both values where two disagree, and what to do about it. Catch
``HashnetError`` to catch them all; jobs and the command line print it without a stack trace.

A class exists because a program treats it differently: this code base, or a caller. ConfigError (it lists
``mistakes``), DataError, TooManyBad and ClusterError are for callers of the library and of ``cluster``,
the three kinds of ClientError for callers of ``Client``; DeviceMemoryError for callers of ``Encoder``, who
try again with fewer rows; StaleIndex for those who update an index from several processes, who refresh it and
repeat the update. The exit code says whether to correct the input (2) or to run again (1).

One is defined elsewhere: ApiError of ``hashnet.server``, an error response with its HTTP status, which stays
inside the processes of a server.
"""


class HashnetError(Exception):
    """Root of the tree. ``exit_code`` is what a command that fails with it returns."""

    exit_code = 2


class ConfigError(HashnetError):
    """One or more mistakes in a configuration, all reported together."""

    def __init__(self, mistakes: list[str] | str) -> None:
        self.mistakes = [mistakes] if isinstance(mistakes, str) else list(mistakes)
        super().__init__("\n".join(self.mistakes))


class DataError(HashnetError):
    """Input data that cannot be used as it is."""


class BadImage(DataError):
    """One picture that cannot be used. ``reason`` is a short stable word for counting."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)

    def __reduce__(self) -> tuple:
        return type(self), (self.reason, self.detail)


class TooManyBad(DataError):
    """More bad rows than ``max_bad_fraction`` allows; the rows that could be encoded are kept."""

    exit_code = 1


class CodeError(HashnetError, ValueError):
    """Codes or labels of the wrong width, dtype or shape."""


class StorageError(HashnetError):
    """A path or URI that cannot be read or written."""

    exit_code = 1


class FormatError(HashnetError):
    """An artefact that is incomplete, damaged, foreign, or written by a newer version."""


class LineageMismatch(HashnetError):
    """Two artefacts that were not made for each other."""


class ModelError(HashnetError):
    """An unknown backbone, or weights that do not fit it."""


class DeviceMemoryError(HashnetError, MemoryError):
    """A batch that does not fit into the memory of the GPU."""


class Diverged(HashnetError):
    """The loss became NaN or infinite."""

    exit_code = 1


class IndexMismatch(HashnetError, ValueError):
    """A query, or an argument of a search, that does not fit the index."""


class IdTaken(IndexMismatch):
    """An id to be added that the index holds already."""


class StaleIndex(IndexMismatch):
    """The index on disk has changed: refresh it and repeat the update."""


class UnknownId(HashnetError, KeyError):
    """An id that the index does not hold."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return Exception.__str__(self)


class Unsupported(HashnetError):
    """An operation that this kind of index does not have."""


EXTRAS = {  # module that may be missing → the extra that brings it; Ray and anything else: "cluster"
    **dict.fromkeys(("faiss", "numba", "scipy", "PIL", "simplejpeg", "yaml", "tqdm"), "search"),
    **dict.fromkeys(("pydantic", "orjson", "prometheus_client"), "serve"),
    **dict.fromkeys(("uvicorn", "uvloop", "httptools"), "serve"),
    **dict.fromkeys(("torch", "torchvision", "safetensors", "sklearn", "threadpoolctl"), "train"),
    **dict.fromkeys(("matplotlib", "jinja2"), "train"),
}


class NotInstalled(HashnetError, ImportError):
    """``what`` needs a package that is not installed; names the extra that brings it."""

    def __init__(self, what: str, package: str) -> None:
        self.what = what
        self.package = package
        extra = EXTRAS.get(package.partition(".")[0], "cluster")
        super().__init__(
            f"{what} needs {package}, which is not installed: pip install 'hashnet[{extra}]', "
            f"or in a checkout '.[{extra}]'"
        )

    def __reduce__(self) -> tuple:
        return type(self), (self.what, self.package)


class ClusterError(HashnetError):
    """The cluster cannot run the job, or failed while running it."""

    exit_code = 1


class ClientError(HashnetError):
    """A request to the server failed."""

    exit_code = 1


class ServerUnavailable(ClientError):
    """No response, or none in time: worth trying again later."""


class RequestRejected(ClientError):
    """The server refused the request (4xx). ``code`` is its machine-readable reason."""

    exit_code = 2

    def __init__(self, message: str, code: str = "", status: int = 0) -> None:
        self.code = code
        self.status = status
        super().__init__(message)


class ServerFailed(ClientError):
    """The server failed (5xx)."""
