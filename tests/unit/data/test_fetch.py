"""Fetching pictures: files, tar members, Parquet values, bare pixels, bytes inside; and what goes wrong."""

from __future__ import annotations

import io
import os
import tarfile
import threading
import time
from threading import Barrier

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hashnet.data import fetch
from hashnet.data.fetch import (
    byte_range_uris,
    describe_bad,
    fetch_images,
    parquet_value_uris,
    parse_reference,
)
from hashnet.data.images import decode
from hashnet.errors import BadImage, StorageError
from hashnet.io import storage


def rows(*uris: str | None) -> pa.Table:
    return pa.table({"uri": pa.array(uris, pa.string())})


def test_files_in_order_with_many_threads(tmp_path):
    names = []
    for i in range(50):
        (tmp_path / f"{i}.jpg").write_bytes(b"picture %d" % i)
        names.append(str(tmp_path / f"{i}.jpg"))
    assert fetch_images(rows(*names)) == [b"picture %d" % i for i in range(50)]
    assert fetch_images(rows(*names), threads=1) == [b"picture %d" % i for i in range(50)]
    assert fetch_images(rows("7.jpg", "8.jpg"), base_uri=str(tmp_path)) == [b"picture 7", b"picture 8"]
    assert fetch_images(rows(names[3], names[3])) == [b"picture 3", b"picture 3"]


def test_bytes_inside_come_before_the_uri(tmp_path):
    table = pa.table({"uri": ["nowhere.jpg", None], "image": pa.array([b"inside", None], pa.binary())})
    found = fetch_images(table)
    assert found[0] == b"inside"
    assert isinstance(found[1], BadImage)
    assert fetch_images(pa.table({"image": pa.array([b"a"])})) == [b"a"]


def test_tar_members_by_offset_and_size(tmp_path):
    path = tmp_path / "shard.tar"
    with tarfile.open(path, "w") as tar:
        for i in range(20):
            info = tarfile.TarInfo(f"{i}.jpg")
            info.size = 10 + 40 * i
            tar.addfile(info, io.BytesIO(bytes([i]) * info.size))
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    uris = byte_range_uris(str(path), [m.offset_data for m in members], [m.size for m in members])
    assert fetch_images(pa.table({"uri": uris})) == [bytes([i]) * (10 + 40 * i) for i in range(20)]
    beyond = fetch_images(rows(f"{path}#offset=1&size=99999999"))[0]
    assert isinstance(beyond, BadImage)
    assert beyond.reason == "truncated"


def test_parquet_values_plain_and_struct(tmp_path):
    pictures = [b"p%d" % i for i in range(25)]
    table = pa.table(
        {
            "image": pa.StructArray.from_arrays(
                [pa.array([*pictures[:-1], None], pa.binary()), pa.array([f"{i}.jpg" for i in range(25)])],
                names=["bytes", "path"],
            ),
            "plain": pa.array(pictures, pa.binary()),
        }
    )
    path = str(tmp_path / "p.parquet")
    pq.write_table(table, path, row_group_size=10)
    for column in ("plain", "image.bytes"):
        uris = pa.concat_arrays([parquet_value_uris(path, column, g, n) for g, n in enumerate((10, 10, 5))])
        found = fetch_images(pa.table({"uri": uris}))
        assert found[:24] == pictures[:24]
        if column == "plain":
            assert found[24] == pictures[24]
        else:
            assert isinstance(found[24], BadImage)
    shuffled = [7, 21, 3, 14, 7]
    wanted = rows(*[f"{path}#column=plain&group={i // 10}&row={i % 10}" for i in shuffled])
    assert fetch_images(wanted) == [pictures[i] for i in shuffled]
    for wrong in (
        f"{path}#column=plain&group=0&row=77",
        f"{path}#column=other&group=0&row=0",
        f"{path}x#column=plain&group=0&row=0",
    ):
        assert isinstance(fetch_images(rows(wrong))[0], BadImage)


class Watched:
    """A file system that counts the looks at a file and may hold an opening up."""

    def __init__(self, filesystem, before_opening=lambda: None):
        self.filesystem, self.before_opening, self.looks = filesystem, before_opening, 0

    def get_file_info(self, path):
        self.looks += 1
        return self.filesystem.get_file_info(path)

    def open_input_file(self, path):
        self.before_opening()
        return self.filesystem.open_input_file(path)


def watch(monkeypatch, **options) -> Watched:
    filesystem, resolve = Watched(storage.resolve("/")[0], **options), storage.resolve
    monkeypatch.setattr(storage, "resolve", lambda uri: (filesystem, resolve(uri)[1]))
    return filesystem


def test_a_parquet_file_is_looked_at_once_a_batch(tmp_path, monkeypatch):
    path = str(tmp_path / "p.parquet")
    pictures = [b"p%d" % i for i in range(60)]
    pq.write_table(pa.table({"image": pictures}), path, row_group_size=10)
    uris = [f"{path}#column=image&group={i // 10}&row={i % 10}" for i in range(60)]
    filesystem = watch(monkeypatch)
    for batches in (1, 2):
        assert fetch_images(rows(*uris)) == pictures
        assert filesystem.looks == batches


def test_row_groups_are_read_side_by_side(tmp_path, monkeypatch):
    path = str(tmp_path / "p.parquet")
    pq.write_table(pa.table({"image": [b"first", b"second"]}), path, row_group_size=1)
    both = Barrier(2)
    watch(monkeypatch, before_opening=lambda: both.wait(timeout=10))
    found = fetch_images(rows(*[f"{path}#column=image&group={i}&row=0" for i in range(2)]))
    assert found == [b"first", b"second"]


def test_a_parquet_file_that_was_replaced_is_read_anew(tmp_path):
    path = str(tmp_path / "p.parquet")
    for content in (b"old", b"newer"):
        pq.write_table(pa.table({"image": pa.array([content])}), path)
        assert fetch_images(rows(f"{path}#column=image&group=0&row=0")) == [content]


def test_bare_pixels_decode(tmp_path):
    planes = np.random.default_rng(0).integers(0, 256, (3, 4, 5), dtype=np.uint8)
    (tmp_path / "batch.bin").write_bytes(b"\x07" + planes.tobytes())
    found = fetch_images(rows(f"{tmp_path}/batch.bin#offset=1&size=60&raw=3x4x5"))[0]
    np.testing.assert_array_equal(decode(found), planes.transpose(1, 2, 0))


def test_a_name_may_hold_a_hash_sign(tmp_path):
    name = str(tmp_path / "cat#offset=3.jpg")
    with open(name, "wb") as file:
        file.write(b"meow")
    assert parse_reference(name).offset is None
    assert fetch_images(rows(name)) == [b"meow"]


def test_missing_and_unreadable_are_told_apart(tmp_path):
    found = fetch_images(rows(str(tmp_path / "no.jpg"), str(tmp_path), None, "nosuch://bucket/x.jpg"))
    assert [error.reason for error in found] == ["missing", "unreadable", "missing", "unreadable"]


def test_one_wrong_reference_takes_no_other_with_it(tmp_path):
    """Each of these once could end a job, or cost its neighbours in the same file."""
    table = pa.table({"image": pa.array([b"first", b"second"]), "n": [1, 2]})
    parquet = str(tmp_path / "p.parquet")
    pq.write_table(table, parquet)
    plain = tmp_path / "batch.bin"
    plain.write_bytes(b"x" * 100)
    wanted = {
        f"{parquet}#column=image&group=0&row=1": b"second",
        f"{parquet}#column=image&group=7&row=0": "unreadable",  # no such row group
        f"{parquet}#column=n&group=0&row=0": "unreadable",  # a number
        f"{plain}#offset=3&size=2": b"xx",
        f"{plain}#offset=0&size=100&raw=3x32x32": "unreadable",  # 3,072 bytes of pixels in 100
        f"{plain}#offset=99&size=2": "truncated",
        f"{plain}#offset=0&size={1 << 40}": "too_large",
        f"{plain}#offset={1 << 70}&size=1": "unreadable",
        "a\0b.jpg": "unreadable",
    }
    found = fetch_images(rows(*wanted), threads=1)
    assert [each.reason if isinstance(each, BadImage) else each for each in found] == list(wanted.values())


def test_the_sentence_about_bad_pictures():
    bad = [BadImage("missing")] * 4 + [BadImage("corrupt")] * 2
    names = [f"{i}.jpg" for i in range(6)]
    assert describe_bad(names, bad, 1000) == (
        "6 of 1,000 pictures cannot be used (4 missing, 2 corrupt): 0.jpg, 1.jpg, 2.jpg, 3.jpg, 4.jpg, …"
    )


def test_only_regular_files_are_pictures(tmp_path):
    """Opening a FIFO waits until somebody writes to it, and /dev/zero never ends."""
    os.mkfifo(tmp_path / "fifo.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "link.jpg").symlink_to(tmp_path / "good.jpg")
    (tmp_path / "good.jpg").write_bytes(b"picture")
    names = ["fifo.jpg", "zero.jpg", "folder.jpg", "link.jpg", "good.jpg"]
    found = fetch_images(rows(*names), base_uri=str(tmp_path))
    assert found[3:] == [b"picture", b"picture"]
    for name, error in zip(names[:3], found, strict=False):
        assert str(error) == f"unreadable: {tmp_path}/{name} is not a regular file"
    (value,) = fetch_images(rows(f"{tmp_path}/fifo.jpg#column=image&group=0&row=0"))
    assert str(value) == f"unreadable: {tmp_path}/fifo.jpg is not a regular file"


@pytest.mark.parametrize("threads", [1, 4])
def test_a_read_that_is_stuck_becomes_a_bad_row_and_the_others_are_read(tmp_path, monkeypatch, threads):
    released, plain = threading.Event(), fetch._open

    def hang(file):
        if file.endswith("/stuck.jpg"):
            released.wait()
        return plain(file)

    monkeypatch.setattr(fetch, "_open", hang)
    monkeypatch.setattr(fetch, "READ_TIMEOUT_S", 0.2)
    names = [f"{i}.jpg" for i in range(6)]
    for name in [*names, "stuck.jpg"]:
        (tmp_path / name).write_bytes(name.encode())
    found = fetch_images(rows(*names[:3], "stuck.jpg", *names[3:]), str(tmp_path), threads)
    error = found.pop(3)
    assert str(error) == f"timeout: {tmp_path}/stuck.jpg was not read within 0.2 s"
    assert found == [name.encode() for name in names]
    released.set()  # what is read too late changes nothing
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "fetch")


@pytest.mark.parametrize(("outage_s", "read"), [(0.3, True), (60, False)])
@pytest.mark.parametrize("late", [["b.jpg"], ["a.jpg", "b.jpg", "c.jpg"]])
def test_pictures_that_were_out_of_reach_for_a_while_are_read_again(
    tmp_path, monkeypatch, late, outage_s, read
):
    plain, until = fetch._open, time.monotonic() + outage_s
    released = threading.Event()

    def hang(file):
        opened.append(os.path.basename(file))
        if opened[-1] in late and time.monotonic() < until:
            released.wait()  # such a read never returns
        return plain(file)

    opened: list[str] = []
    monkeypatch.setattr(fetch, "_open", hang)
    monkeypatch.setattr(fetch, "READ_TIMEOUT_S", 0.4)
    names = ["a.jpg", "b.jpg", "c.jpg"]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    found = fetch_images(rows(*names), str(tmp_path))
    released.set()
    for name, one in zip(names, found, strict=True):
        assert one == name.encode() if read or name not in late else fetch._timed_out(one)
    assert sorted(opened) == sorted(names + late)  # what was read is not read again


@pytest.mark.parametrize(
    ("storage_says", "outcome"),
    [
        ("nothing", r"cannot read s3://bucket/a.jpg: no answer within 0.2 s \(NETWORK_CONNECTION\)"),
        ("AWS Error NETWORK_CONNECTION", r"cannot read s3://bucket/a.jpg: no answer within 0.2 s"),
        ("AWS Error ACCESS_DENIED", "timeout: s3://bucket/a.jpg was not read within 0.2 s"),
        ("yes", "timeout: s3://bucket/a.jpg was not read within 0.2 s"),
    ],
)
def test_a_stuck_read_makes_a_bad_picture_only_where_the_storage_answers(monkeypatch, storage_says, outcome):
    released, asked = threading.Event(), []

    class Bucket:
        def get_file_info(self, path):
            asked.append(path)
            if storage_says == "nothing":
                released.wait()
            if storage_says != "yes":
                raise OSError(storage_says)

    def hang(file):
        released.wait()
        raise OSError("too late")

    monkeypatch.setattr(fetch, "_open", hang)
    monkeypatch.setattr(fetch.storage, "resolve", lambda uri: (Bucket(), "bucket/a.jpg"))
    monkeypatch.setattr(fetch, "READ_TIMEOUT_S", 0.2)
    try:
        if outcome.startswith("timeout"):
            (found,) = fetch_images(rows("s3://bucket/a.jpg"))
            assert str(found) == outcome
            assert asked == ["bucket", "bucket"]
        else:
            with pytest.raises(StorageError, match=outcome):
                fetch_images(rows("s3://bucket/a.jpg"))
            assert asked == ["bucket"]
    finally:
        released.set()


def test_a_storage_out_of_reach_is_an_error_not_a_bad_picture(monkeypatch):
    """What Arrow says where a host has no network."""

    def fail(file):
        raise OSError("AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 7")

    monkeypatch.setattr(fetch, "_open", fail)
    with pytest.raises(StorageError, match=r"cannot read s3://bucket/a.jpg: AWS Error NETWORK_CONNECTION"):
        fetch_images(rows("s3://bucket/a.jpg", "s3://bucket/b.jpg"))
