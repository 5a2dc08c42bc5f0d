"""Run: one folder with everything a run of the stages makes, and the only place that knows its names.

run = Run("runs/demo")                # a local path, or any URI pyarrow opens
run.codes.exists()                    # every artefact: exists · open · write · describe · verify
store = run.codes.open()

RUN/manifest.parquet/   the data                 RUN/config.yaml    the settings it was trained with
RUN/model/              the trained network      RUN/checkpoints/   training so far
RUN/codes/              the database, encoded    RUN/codes-query/   the queries, encoded
RUN/index/              the search index         RUN/report/        the evaluation
RUN/duplicates/         near-duplicates          RUN/leakage/       database rows near another set
RUN/cache/              backbone features of pictures, kept so that each is computed once

A comparison also has RUN/cells/, RUN/zero-shot.parquet/, RUN/backbone-PART/ and RUN/tuned.json; a sweep has
RUN/trials/, RUN/best.yaml, RUN/best-VARIANT.yaml, RUN/tuned.json and RUN/sweep.json; the demo has
RUN/pictures.parquet/ and RUN/compare/, a run of its own.
"""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING

from hashnet.io import Artefact, storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from hashnet.data import ManifestArtefact
    from hashnet.dedup import DuplicatesArtefact
    from hashnet.index import IndexArtefact
    from hashnet.metrics import NeighbourArtefact, ReportArtefact
    from hashnet.models import ModelArtefact
    from hashnet.store import CodesArtefact


VECTOR_BLOCK = 8192  # vectors read at once
KNOWN = {"manifest", "model", "codes", "query_codes", "index", "report", "duplicates", "leakage"}


class Run:
    """A run's folder. Making one reads nothing; the artefacts are opened one by one.

    ``elsewhere`` puts artefacts of the run at other places: ``Run(uri, model="s3://models/today")``;
    None leaves one where it belongs.
    """

    def __init__(self, uri: str | os.PathLike, **elsewhere: str | None) -> None:
        self.uri = str(uri)
        unknown = set(elsewhere) - KNOWN
        if unknown:
            raise TypeError(f"a run has no artefact called {', '.join(sorted(unknown))}")
        self._elsewhere = {name: place for name, place in elsewhere.items() if place is not None}

    def __repr__(self) -> str:
        return f"Run({self.uri!r})"

    @property
    def name(self) -> str:
        return storage.name_of(self.uri)

    @property
    def manifest(self) -> ManifestArtefact:
        from hashnet.data import ManifestArtefact

        return ManifestArtefact(self._place("manifest", "manifest.parquet"))

    @property
    def model(self) -> ModelArtefact:
        from hashnet.models import ModelArtefact

        return ModelArtefact(self._place("model", "model"))

    @property
    def codes(self) -> CodesArtefact:
        return self.store("codes", "database")

    @property
    def query_codes(self) -> CodesArtefact:
        return self.store("codes", "query")

    def store(self, output: str, split: str) -> CodesArtefact:
        """Codes or features (``output``) of one split; the database's need no suffix."""
        from hashnet.store import CodesArtefact

        folder = output if split == "database" else f"{output}-{split}"
        artefact = {"codes": "codes", "codes-query": "query_codes"}.get(folder, folder)
        return CodesArtefact(self._place(artefact, folder), output)

    @property
    def index(self) -> IndexArtefact:
        from hashnet.index import IndexArtefact

        return IndexArtefact(self._place("index", "index"))

    @property
    def report(self) -> ReportArtefact:
        from hashnet.metrics import ReportArtefact

        return ReportArtefact(self._place("report", "report"))

    @property
    def neighbours(self) -> NeighbourArtefact:
        """The evaluation of a run without labels, in the folder of the report."""
        from hashnet.metrics import NeighbourArtefact

        return NeighbourArtefact(self.report.uri)

    @property
    def duplicates(self) -> DuplicatesArtefact:
        return self._duplicates("duplicates")

    @property
    def leakage(self) -> DuplicatesArtefact:
        return self._duplicates("leakage")

    def _duplicates(self, name: str) -> DuplicatesArtefact:
        from hashnet.dedup import DuplicatesArtefact

        return DuplicatesArtefact(self._place(name, name))

    @property
    def config(self) -> str:
        """The URI of the settings the run was trained with."""
        return storage.join(self.uri, "config.yaml")

    @property
    def pairs(self) -> str:
        """The URI of the pairs table that ``pairs=neighbours`` makes."""
        return storage.join(self.uri, "pairs.parquet")

    @property
    def checkpoints(self) -> str:
        """The URI of the folder of training checkpoints."""
        return storage.join(self.uri, "checkpoints")

    @property
    def cache(self) -> str:
        """The URI of the folder of kept backbone features, which may be deleted at any time."""
        return storage.join(self.uri, "cache")

    @property
    def cells(self) -> str:
        """The URI of the folder of a comparison's cells."""
        return storage.join(self.uri, "cells")

    def cell(self, part: str, name: str) -> str:
        """The URI of the folder of one cell of a comparison."""
        return storage.join(self.cells, part, name)

    def backbone(self, part: str) -> str:
        """The URI of the folder of the features that shallow methods of a comparison learn from."""
        return storage.join(self.uri, f"backbone-{part}")

    @property
    def zero_shot(self) -> ManifestArtefact:
        """The manifest of a comparison's zero-shot table."""
        from hashnet.data import ManifestArtefact

        return ManifestArtefact(storage.join(self.uri, "zero-shot.parquet"))

    @property
    def tuned(self) -> str:
        """The URI of the settings that a comparison or a sweep has chosen."""
        return storage.join(self.uri, "tuned.json")

    def trial(self, name: str) -> str:
        """The URI of the run of one trial of a sweep."""
        return storage.join(self.uri, "trials", name)

    def best(self, variant: str | None = None) -> str:
        """The URI of a sweep's best configuration, of all or of one variant."""
        return storage.join(self.uri, "best.yaml" if variant is None else f"best-{variant}.yaml")

    @property
    def sweep(self) -> str:
        """The URI of a sweep's table."""
        return storage.join(self.uri, "sweep.json")

    @property
    def pictures(self) -> ManifestArtefact:
        """The manifest that the demo makes of a folder of pictures."""
        from hashnet.data import ManifestArtefact

        return ManifestArtefact(storage.join(self.uri, "pictures.parquet"))

    @property
    def comparison(self) -> Run:
        """The run of the demo's comparison."""
        return Run(storage.join(self.uri, "compare"))

    def vectors(self, split: str, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Blocks float32 (n, d) of the vectors of row ids int64 ascending: what the codes were made from.

        Those of a manifest of vectors, or the features that encode_db wrote for pictures.
        """
        import numpy as np

        from hashnet.data import feature_matrix
        from hashnet.errors import DataError
        from hashnet.store import FeatureStore

        manifest = self.manifest.open(verify=False)
        if manifest.modality == "features":
            for first in range(0, len(ids), VECTOR_BLOCK):
                for table in manifest.rows_by_id(ids[first : first + VECTOR_BLOCK], ["feature"]):
                    yield feature_matrix(table)
            return
        artefact = self.store("features", split)
        if not artefact.exists():
            raise DataError(
                f"{self.uri} has no vectors of its {split} pictures to compare the codes with; run "
                f"jobs/encode_db.py run={self.uri} output=features split={split}"
            )
        for found, features, _ in FeatureStore.open(artefact.uri).blocks(VECTOR_BLOCK, labels=False):
            yield features[np.isin(found, ids)]

    def artefacts(self) -> list[Artefact]:
        """The five artefacts in the order they are made, whether they exist or not."""
        report = self.neighbours if self.neighbours.exists() and not self.report.exists() else self.report
        return [self.manifest, self.model, self.codes, self.index, report]

    def further_artefacts(self) -> list[Artefact]:
        """Those that not every run has."""
        features = [self.store("features", split) for split in ("database", "query")]
        return [self.query_codes, *features, self.duplicates, self.leakage]

    def begun(self) -> bool:
        """Whether a stage has written here; a manifest alone is data, not yet a run."""
        made = (self.model.uri, self.codes.uri, self.index.uri)
        return any(storage.exists(uri) for uri in (self.config, self.checkpoints, *made))

    def check_folder(self) -> None:
        """DataError where a run without an index does not exist, or its folder is an artefact of one."""
        from hashnet.errors import DataError

        if self.index.exists():
            return
        uri = self.uri.rstrip("/")
        parent, name = storage.parent_folder(uri), storage.name_of(uri)
        if not storage.exists(uri):
            near = difflib.get_close_matches(name, storage.list_names(parent), n=1)
            beside = uri.removesuffix(name)
            hint = f"did you mean {beside}{near[0]}?" if near else "check the path"
            raise DataError(f"{self.uri} does not exist; {hint}")
        parts = [*Run(parent).artefacts(), *Run(parent).further_artefacts()]
        if name in {storage.name_of(part.uri) for part in parts}:
            raise DataError(f"{self.uri} is a part of a run; give the run, {parent}, not its {name}/")

    def _place(self, artefact: str, name: str) -> str:
        return self._elsewhere.get(artefact) or storage.join(self.uri, name)
