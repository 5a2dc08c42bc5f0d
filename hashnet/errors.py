"""Every exception this project raises on purpose.

    HashnetError
    ├── ConfigError          a configuration key or value; lists every mistake it found
    ├── DataError            input data: lists, labels, manifests, pairs, features
    │   ├── ManifestError    a manifest that is damaged, foreign or does not fit
    │   └── BadImage         one picture that cannot be used; carries a short ``reason``
    ├── CodeError            codes or labels of the wrong width, dtype or shape
    ├── StorageError         a path or URI that cannot be read or written
    ├── FormatError          an artefact that is foreign, damaged or newer than this version
    ├── LineageMismatch      two artefacts that were not made for each other
    ├── StoreError           a code store that is incomplete or inconsistent
    │   └── TooManyBad       more bad rows than ``max_bad_fraction`` allows
    ├── SearchError          the search index
    │   ├── IndexMismatch    query and index do not fit together
    │   │   ├── IdTaken      an id to be added that the index holds already
    │   │   └── StaleIndex   somebody else has written the index meanwhile
    │   ├── UnknownId        an id the index does not hold
    │   └── Unsupported      something this kind of index cannot do
    ├── ModelError           unknown backbone, weights that do not fit
    ├── TrainingError        training cannot start or had to stop
    │   └── Diverged         NaN or infinite loss; names step, beta and learning rate
    ├── ClusterError         the cluster cannot do what was asked of it, or failed at it
    └── ClientError          the server could not be asked or said no
        ├── ServerUnavailable    no answer, or none in time; worth trying again
        ├── RequestRejected      4xx: the request is wrong; carries ``code``
        └── ServerFailed         5xx: the server is wrong

A message names what was wrong, both values where two disagree, and what to do about it. Catch
``HashnetError`` to catch them all; jobs and the command line print it without a stack trace.
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


class ManifestError(DataError):
    """A manifest that is damaged, foreign or does not fit."""


class BadImage(DataError):
    """One picture that cannot be used. ``reason`` is a short stable word for counting."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)

    def __reduce__(self) -> tuple:
        return type(self), (self.reason, self.detail)


class CodeError(HashnetError, ValueError):
    """Codes or labels of the wrong width, dtype or shape."""


class StorageError(HashnetError):
    """A path or URI that cannot be read or written."""

    exit_code = 1


class FormatError(HashnetError):
    """An artefact that is foreign, damaged, or written by a newer version."""


class LineageMismatch(HashnetError):
    """Two artefacts that were not made for each other."""


class StoreError(HashnetError):
    """A code store that is incomplete or inconsistent."""


class TooManyBad(StoreError):
    """More bad rows than ``max_bad_fraction`` allows; what could be encoded is kept."""

    exit_code = 1


class SearchError(HashnetError):
    """The search index."""


class IndexMismatch(SearchError, ValueError):
    """A query and an index that do not fit together."""


class IdTaken(IndexMismatch):
    """An id to be added that the index holds already."""


class StaleIndex(IndexMismatch):
    """The index on disk is of another version by now: refresh and repeat the update."""


class UnknownId(SearchError, KeyError):
    """An id the index does not hold."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return Exception.__str__(self)


class Unsupported(SearchError):
    """Something this kind of index cannot do."""


class ModelError(HashnetError):
    """An unknown backbone, or weights that do not fit it."""


class TrainingError(HashnetError):
    """Training cannot start, or had to stop."""


class Diverged(TrainingError):
    """The loss became NaN or infinite."""

    exit_code = 1


class ClusterError(HashnetError):
    """The cluster cannot do what was asked of it, or failed at it."""

    exit_code = 1


class ClientError(HashnetError):
    """The server could not be asked, or said no."""

    exit_code = 1


class ServerUnavailable(ClientError):
    """No answer, or none in time: worth trying again later."""


class RequestRejected(ClientError):
    """The server refused the request (4xx). ``code`` is its machine-readable reason."""

    exit_code = 2

    def __init__(self, message: str, code: str = "", status: int = 0) -> None:
        self.code = code
        self.status = status
        super().__init__(message)


class ServerFailed(ClientError):
    """The server failed (5xx)."""
