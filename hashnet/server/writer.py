"""The one writer of an index: what is added and removed through the API."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from hashnet.client import bad
from hashnet.errors import HashnetError, IdTaken, LineageMismatch, StaleIndex
from hashnet.server.calls import blame
from hashnet.server.index_holder import check_model

ATTEMPTS = 5  # at a change, while somebody else writes the index, too


class Writer:
    """The one writer of an index: every change is on disk, as a new version, when it returns."""

    def __init__(self, uri: str, model_sha256: str | None) -> None:
        from hashnet.index import BinaryIndex

        self.uri, self.model_sha256 = uri, model_sha256
        self.index = BinaryIndex.load(uri)

    def write(self, what: str, *arguments: Any) -> tuple[int, int] | tuple[str, str, int]:
        """(version, size), or (code, message, status) of what is wrong."""
        try:
            for _ in range(ATTEMPTS):
                with suppress(StaleIndex):  # a job compacts or builds it just now: nothing was changed yet
                    return self._change(what, *arguments)
        except LineageMismatch as error:
            return "index_changed", str(error), 409
        except IdTaken as error:
            return "id_taken", str(error), 409
        except HashnetError as error:
            return blame(error)
        return "unavailable", "somebody else goes on writing the index; nothing was changed, try again", 503

    def _change(self, what: str, *arguments: Any) -> tuple[int, int]:
        self.index.refresh()
        check_model(self.index.lineage, self.model_sha256, self.uri)  # built anew with another one?
        changes: dict[str, Any] = {"add": self._add, "remove": self.index.remove}
        changes[what](*arguments)
        return self.index.version, len(self.index)

    def _add(self, codes: np.ndarray, ids: np.ndarray, labels: list[list[int]] | None) -> None:
        multi_hot = None
        if labels is not None and self.index.n_classes is not None:
            n_classes = self.index.n_classes
            multi_hot = np.zeros((len(ids), n_classes), dtype=np.uint8)
            for row, own in enumerate(labels):
                if any(label >= n_classes for label in own):
                    raise bad(
                        "unknown_label",
                        f"item {int(ids[row])} has class {max(own)}; there are {n_classes}",
                        422,
                    )
                multi_hot[row, own] = 1
        elif labels is not None:
            raise bad("no_labels", "this index was built without labels; add the items without them", 422)
        self.index.add(codes, ids, multi_hot)


def written_or_raise(answer: tuple[int, int] | tuple[str, str, int]) -> tuple[int, int]:
    if len(answer) == 3:
        raise bad(*answer)
    return answer
