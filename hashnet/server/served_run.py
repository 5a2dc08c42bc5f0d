"""ServedRun: the artefacts of a run that a server needs, checked before any process is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hashnet.data import Manifest
from hashnet.errors import ConfigError, LineageMismatch
from hashnet.run import Run
from hashnet.server.settings import NO_MODEL, ServeConfig
from hashnet.store import CodeStore, ItemLookup


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
        return ["codes", "ids", *encoded]

    @classmethod
    def open(cls, config: ServeConfig) -> ServedRun:
        """Opens every artefact of the run; refuses those that were not made for each other."""
        model_uri = None if config.model == NO_MODEL else config.model
        run = Run(config.run, index=config.index, codes=config.codes, model=model_uri)
        about = run.index.read()
        sha256 = modality = n_features = class_names = None
        has_model = config.model != NO_MODEL and (config.model is not None or run.model.exists())
        if has_model:
            info = run.model.info()
            sha256, modality, n_features = info.sha256, info.modality, info.n_features
            class_names = info.class_names
            check_model(about["lineage"], sha256, run.index.uri)
        has_codes = config.codes is not None or run.codes.exists()
        if has_codes:
            _check_codes(run.codes.open(), about, run.index.uri)
        pictures, has_manifest = False, run.manifest.exists()
        if has_manifest:
            manifest = run.manifest.open(check=False)
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
        # Parts are not read through to check them: pictures are looked up one by one.
        manifest = Manifest.open(self.manifest, check=False) if self.manifest else None
        return ItemLookup(CodeStore.open(self.codes), manifest, self.base_uri)


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
