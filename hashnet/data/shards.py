"""Keeping the bytes of many pictures: inside the manifest, in tars, in Parquet files, or a file each."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.parquet as pq

from hashnet.data import references
from hashnet.io import storage

STORES = ("inline", "tar", "parquet", "files")
PARQUET_GROUP = 512  # rows of a row group: what fetching one picture has to read
FILES_PER_FOLDER = 1_000


def keep(
    store: str, folder: str, number: int, names: list[str], pictures: Iterable[bytes], labels: pa.Array
) -> pa.Table:
    """Stores one shard of pictures and returns the payload (``uri``, and ``image`` when inline)."""
    if store == "inline":
        return pa.table({"uri": pa.array(names), "image": pa.array(list(pictures), pa.binary())})
    if store == "tar":
        uris = _keep_tar(storage.join(folder, f"shard-{number:05d}.tar"), names, pictures, labels)
    elif store == "parquet":
        uris = _keep_parquet(storage.join(folder, f"shard-{number:05d}.parquet"), names, pictures, labels)
    else:
        uris = _keep_files(folder, names, pictures)
    return pa.table({"uri": uris})


def _keep_tar(uri: str, names: list[str], pictures: Iterable[bytes], labels: pa.Array) -> pa.Array:
    """A tar in the WebDataset manner: KEY.jpg and KEY.json with the labels. No clock, no owner in it."""
    offsets, sizes = [], []
    with (
        storage.open_output(uri) as sink,
        tarfile.open(fileobj=sink, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for name, picture, classes in zip(names, pictures, labels.to_pylist(), strict=True):
            offsets.append(tar.offset + tarfile.BLOCKSIZE)  # after the member's header
            sizes.append(len(picture))
            about = json.dumps({"labels": classes}).encode()
            for member, data in ((name, picture), (f"{name.rpartition('.')[0]}.json", about)):
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return references.byte_ranges(uri, offsets, sizes)


def _keep_parquet(uri: str, names: list[str], pictures: Iterable[bytes], labels: pa.Array) -> pa.Array:
    """Columns ``image`` (struct of bytes and path) and ``labels``."""
    image = pa.StructArray.from_arrays(
        [pa.array(list(pictures), pa.binary()), pa.array(names)], names=["bytes", "path"]
    )
    table = pa.table({"image": image, "labels": labels})
    with storage.open_output(uri) as sink:
        pq.write_table(table, sink, row_group_size=PARQUET_GROUP, use_dictionary=False)
    groups = range(0, len(names), PARQUET_GROUP)
    blocks = [
        references.parquet_values(uri, "image.bytes", g, min(PARQUET_GROUP, len(names) - start))
        for g, start in enumerate(groups)
    ]
    return pa.concat_arrays(blocks)


def _keep_files(folder: str, names: list[str], pictures: Iterable[bytes]) -> pa.Array:
    uris = []
    for name, picture in zip(names, pictures, strict=True):
        group = f"{int(name.partition('.')[0]) // FILES_PER_FOLDER:06d}"
        uris.append(storage.join(folder, group, name))
        storage.write_bytes(uris[-1], picture)
    return pa.array(uris)
