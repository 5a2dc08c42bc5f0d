"""The data of a comparison: a manifest for the deep methods, features for the shallow ones.

Shallow methods learn from the manifest's vectors where it has vectors. From pictures they learn through
features of the same backbone, not trained on this data, which the encoding stage makes (RUN/backbone-PART);
or, where that backbone starts without weights, from pixels.
"""

from __future__ import annotations

import numpy as np

from cluster.compare.compare_config import CompareConfig
from cluster.encode import EncodeConfig, encode_database
from hashnet.comparison import Features, RowValues
from hashnet.data import Manifest, feature_matrix
from hashnet.errors import ConfigError, DataError, LineageMismatch
from hashnet.labels import from_lists
from hashnet.run import Run

SPLITS = ("train", "query", "database")
MAX_PIXELS = 3 * 64 * 64  # of a picture used as a vector; larger ones need a backbone with weights


def comparison_manifest(config: CompareConfig) -> Manifest:
    """The manifest given, or RUN/manifest.parquet made from the embedded data set; it has all three sets."""
    own = Run(config.run).manifest
    if config.manifest is not None:
        manifest = Manifest.open(config.manifest)
    elif own.exists():
        manifest = own.open()
    elif config.dataset is not None:
        from hashnet.data import make_manifest

        options = {"modality": config.modality} if config.dataset == "digits" else {}
        manifest = make_manifest(config.dataset, own.uri, **options)
    else:
        raise ConfigError("give the data: manifest=PATH (made by `hashnet dataset`), or dataset=digits")
    missing = [split for split in SPLITS if manifest.count(split) == 0]
    if missing:
        raise DataError(f"{manifest.uri} has no {' and no '.join(missing)} rows; make it with a protocol")
    return manifest


def zero_shot_manifest(config: CompareConfig, manifest: Manifest) -> Manifest | None:
    """The same rows split by seen and unseen classes; None where no zero-shot table is requested."""
    if config.zero_shot_manifest is not None:
        return Manifest.open(config.zero_shot_manifest)
    if not config.zero_shot:
        return None
    from hashnet.data import zero_shot_copy

    own = Run(config.run).zero_shot
    if own.exists():
        made = own.open()
        if made.source["share"] != config.zero_shot:
            raise LineageMismatch(
                f"zero_shot was {made.source['share']}, now {config.zero_shot}: {config.run} has split its "
                "classes already; use another run folder"
            )
        made_of = made.source.get("manifest_sha256", manifest.sha256)  # older versions did not record it
        if made_of != manifest.sha256:
            raise LineageMismatch(
                f"{own.uri} was made of data with sha256 {made_of[:12]}…, {manifest.uri} has "
                f"{manifest.sha256[:12]}…; use another run folder"
            )
        return made
    return zero_shot_copy(manifest, own.uri, config.zero_shot)


def shallow_features(config: CompareConfig, manifest: Manifest, folder: str) -> Features:
    """Features and labels of the three sets, as they are: the methods centre them, and none needs a scale.

    Dividing each column by its deviation would depend on the basis, and whiten features reduced by PCA.
    """
    if manifest.modality == "features":
        sets = {split: _stored(manifest, split) for split in SPLITS}
    elif config.features_from == "pixels":
        sets = pixels(config, manifest)
    else:
        sets = {split: _encoded(config, manifest, folder, split) for split in SPLITS}
    return Features(**sets)


def _stored(manifest: Manifest, split: str) -> RowValues:
    table = manifest.read(split, columns=["row_id", "feature", "labels"])
    labels = from_lists(table["labels"], manifest.n_classes) if manifest.n_classes else None
    return RowValues(feature_matrix(table), labels, table["row_id"].to_numpy())


def pixels(config: CompareConfig, manifest: Manifest) -> dict[str, RowValues]:
    """Pictures, preprocessed as for the backbone, as vectors; one channel where all of them are grey."""
    found = {split: _pictures(config, manifest, split) for split in SPLITS}
    channels = max(block.shape[1] for blocks, *_ in found.values() for block in blocks)
    return {split: RowValues(_joined(blocks, channels), *rest) for split, (blocks, *rest) in found.items()}


def _pictures(
    config: CompareConfig, manifest: Manifest, split: str
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Readable pictures of a set in blocks uint8 (n, 1 where all are grey else 3, h, w), labels, row ids."""
    from hashnet.training import make_model, open_rows

    resolved = config.train_config().resolved(manifest.modality, manifest.count("train"))
    rows = open_rows(manifest, split, make_model(resolved, manifest), resolved)
    blocks, usable = [], []
    for start in range(0, len(rows), 1024):
        batch, good = rows.source.batch(np.arange(start, min(start + 1024, len(rows))), 0)
        pictures = batch.numpy()[good]
        if pictures[:1].size > MAX_PIXELS:
            raise ConfigError(
                f"pictures of {pictures.shape[2]} x {pictures.shape[3]} pixels are too large for shallow "
                "methods; give a backbone with weights=pretrained, whose features they then learn from"
            )
        grey = (pictures == pictures[:, :1]).all()
        blocks.append(pictures[:, :1].copy() if grey else pictures)
        usable.append(good)
    assert rows.labels is not None
    kept = np.concatenate(usable)
    return blocks, rows.labels[kept], rows.row_ids[kept]


def _joined(blocks: list[np.ndarray], channels: int) -> np.ndarray:
    """Rows float32 (n, channels * h * w); grey blocks among coloured ones get their channel three times."""
    joined = np.empty((sum(map(len, blocks)), channels, *blocks[0].shape[2:]), dtype=np.float32)
    start = 0
    for block in blocks:
        joined[start : start + len(block)] = block
        start += len(block)
    return joined.reshape(len(joined), -1)


def _encoded(config: CompareConfig, manifest: Manifest, folder: str, split: str) -> RowValues:
    """Features and labels of a set from the untrained backbone, by the encoding stage, which resumes."""
    import torch

    from hashnet.training import make_model

    model = Run(folder).model
    if not model.exists():
        resolved = config.train_config().resolved(manifest.modality, manifest.count("train"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)  # a backbone with weights=random is the same in every run
            model.write(make_model(resolved, manifest).eval(), summary={"trained": False})
    encode = EncodeConfig(
        run=folder,
        manifest=manifest.uri,
        output="features",
        features_dtype="float32",
        split=split,
        base_uri=config.base_uri,
        cache=config.train_config().cache,
        device=config.device,
        compile=None if config.device == "cuda" else config.compile,
    )
    encode_database(encode)
    store = encode.target.open()
    return RowValues(store.features(), store.labels(), store.ids())
