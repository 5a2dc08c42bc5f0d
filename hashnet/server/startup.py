"""What a server stands on: the folders of a run, checked before any process is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hashnet.data import Manifest
from hashnet.errors import ConfigError, LineageMismatch
from hashnet.io import storage
from hashnet.server.index_holder import check_model
from hashnet.server.settings import ServeConfig
from hashnet.store import CodeStore, ItemLookup


@dataclass(frozen=True)
class Ground:
    """Where everything lies, and what does not change while it is served."""

    paths: dict[str, str | None]  # index, model, codes, manifest, base_uri; None where there is none
    model_sha256: str | None
    fixed: dict[str, Any]
    size: int
    kind: str


def look_over(config: ServeConfig) -> Ground:
    """Opens every part of the run; refuses parts that do not belong together."""
    from hashnet.index import IndexArtefact

    index = config.index if config.index != "auto" else storage.join(config.run, "index")
    about = IndexArtefact(index).read()
    model = _model(config)
    codes = config.codes if config.codes != "auto" else _if_there(config.run, "codes", "_SUCCESS")
    manifest = _if_there(config.run, "manifest.parquet", "_manifest.json")
    fixed: dict[str, Any] = {
        "n_bits": about["n_bits"],
        "modality": None,
        "n_features": None,
        "class_names": None,
        "pictures": False,
    }
    sha256 = None
    if model is not None:
        from hashnet.models import bundle_info

        info = bundle_info(model)
        sha256 = info.sha256
        check_model(about["lineage"], sha256, index)
        fixed |= {"modality": info.modality, "n_features": info.n_features, "class_names": info.class_names}
    if codes is not None:
        _check_codes(CodeStore.open(codes), about, index)
    if manifest is not None:
        listed = Manifest.open(manifest, check=False)
        fixed["pictures"] = listed.modality == "image" and codes is not None
        if listed.class_names is not None:
            fixed["class_names"] = list(listed.class_names)
    paths = {"index": index, "model": model, "codes": codes, "manifest": manifest}
    paths["base_uri"] = config.base_uri
    return Ground(paths, sha256, fixed, about["rows"], about["index_kind"])


def open_catalog(paths: dict[str, str | None]) -> ItemLookup | None:
    """Items by id; None for an index without a code store. ``paths`` as in Ground."""
    codes, manifest = paths["codes"], paths["manifest"]
    if codes is None:
        return None
    # Parts are not read through to check them: pictures are looked up one by one.
    listed = Manifest.open(manifest, check=False) if manifest else None
    return ItemLookup(CodeStore.open(codes), listed, paths["base_uri"])


def _model(config: ServeConfig) -> str | None:
    if config.model == "none":
        return None
    if config.model != "auto":
        return config.model
    return _if_there(config.run, "model", "model.json")


def _if_there(run: str, folder: str, file: str) -> str | None:
    uri = storage.join(run, folder)
    return uri if storage.exists(storage.join(uri, file)) else None


def _check_codes(store: CodeStore, about: dict[str, Any], index: str) -> None:
    """The code store must be of the model the index was made with, or items would be told wrongly."""
    if store.n_bits != about["n_bits"]:
        raise ConfigError(
            f"{store.uri} has {store.n_bits} bits, {index} has {about['n_bits']}: build the index again"
        )
    ours, theirs = store.lineage.get("model_sha256"), about["lineage"].get("model_sha256")
    if ours is not None and theirs is not None and ours != theirs:
        raise LineageMismatch(
            f"{store.uri} was made with model {ours}, {index} with {theirs}: build the index from these codes"
        )
