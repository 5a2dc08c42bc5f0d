"""The single writer of a served index: changes that come through the API."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from hashnet.errors import HashnetError, IdTaken, LineageMismatch, StaleIndex
from hashnet.server.errors import ApiError
from hashnet.server.messages import AddItems, RemoveItems, Written
from hashnet.server.served_run import check_model

ATTEMPTS = 5  # at one change, when another process writes the index too


class IndexWriter:
    """The single writer of an index: when ``write`` returns, the change is on disk as a new version."""

    def __init__(self, uri: str, model_sha256: str | None) -> None:
        from hashnet.index import BinaryIndex

        self.uri, self.model_sha256 = uri, model_sha256
        self.index = BinaryIndex.load(uri)

    def write(self, change: AddItems | RemoveItems) -> Written:
        """The index after the change; ApiError where it cannot be made."""
        try:
            for _ in range(ATTEMPTS):
                with suppress(StaleIndex):  # a job is compacting or building it: nothing was changed yet
                    return self._apply(change)
        except LineageMismatch as error:
            raise ApiError("index_changed", str(error), 409) from error
        except IdTaken as error:
            raise ApiError("id_taken", str(error), 409) from error
        except HashnetError as error:
            raise ApiError.of(error) from error
        raise ApiError(
            "unavailable", "another process keeps writing the index; nothing was changed, try again", 503
        )

    def _apply(self, change: AddItems | RemoveItems) -> Written:
        self.index.refresh()
        check_model(self.index.lineage, self.model_sha256, self.uri)  # it may have been rebuilt with another
        if isinstance(change, AddItems):
            self.index.add(change.codes, change.ids, self._multi_hot(change))
        else:
            self.index.remove(change.ids)
        return Written(self.index.version, len(self.index))

    def _multi_hot(self, change: AddItems) -> np.ndarray | None:
        """uint8 (n, n_classes) of the items' labels."""
        if change.labels is None:
            return None
        n_classes = self.index.n_classes
        if n_classes is None:
            raise ApiError("no_labels", "this index was built without labels; add the items without them")
        multi_hot = np.zeros((len(change.ids), n_classes), dtype=np.uint8)
        for row, labels in enumerate(change.labels):
            if any(label >= n_classes for label in labels):
                raise ApiError(
                    "unknown_label",
                    f"item {int(change.ids[row])} has class {max(labels)}; there are {n_classes}",
                )
            multi_hot[row, labels] = 1
        return multi_hot
