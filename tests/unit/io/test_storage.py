"""Files by path or URI; an unfinished file never shows under its name."""

import hashlib
import os

import pytest

from hashnet.errors import FormatError, StorageError
from hashnet.io import storage


def test_join_keeps_options_at_the_end():
    assert (
        storage.join("s3://b/run?endpoint_override=x", "codes", "a.parquet")
        == "s3://b/run/codes/a.parquet?endpoint_override=x"
    )
    assert storage.join("/a/b/", "c") == "/a/b/c"
    assert storage.join("what?/a", "b") == "what?/a/b"  # a plain path may hold a question mark
    assert storage.name_of("s3://b/run/x.json?scheme=http") == "x.json"


def test_round_trip_and_listing(tmp_path):
    folder = str(tmp_path / "a" / "b")
    storage.write_bytes(storage.join(folder, "x"), b"one")
    storage.write_bytes(storage.join(folder, "x"), b"two")
    assert storage.read_bytes(storage.join(folder, "x")) == b"two"
    assert storage.list_names(folder) == ["x"]
    assert storage.exists(folder)
    assert storage.is_folder(folder)
    assert not storage.is_folder(storage.join(folder, "x"))
    assert storage.size_of(storage.join(folder, "x")) == 3
    assert storage.sha256_of(storage.join(folder, "x")) == hashlib.sha256(b"two").hexdigest()
    assert storage.read_bytes("file://" + storage.join(folder, "x")) == b"two"
    storage.delete(folder)
    storage.delete(folder)
    assert storage.list_names(folder) == []


def test_a_file_uri_is_percent_encoded(tmp_path):
    (tmp_path / "ü x.txt").write_bytes(b"three")
    assert storage.read_bytes((tmp_path / "ü x.txt").as_uri()) == b"three"


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = str(tmp_path / "x")
    storage.write_bytes(path, b"old")

    def interrupted():
        with storage.open_output(path) as sink:
            sink.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    assert storage.read_bytes(path) == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_an_unwritable_place_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        storage.write_bytes(str(tmp_path / "file" / "below"), b"")
    with pytest.raises(StorageError, match="does not exist"):
        storage.read_bytes(str(tmp_path / "missing"))
    with pytest.raises(StorageError, match="cannot open"):
        storage.exists("nosuchscheme://bucket/key")


def test_json_and_formats(tmp_path):
    path = str(tmp_path / "x.json")
    storage.write_json(path, {"kind": "codes", "format_version": 1})
    about = storage.read_json(path)
    assert storage.check_format(about, path, "codes", 1) == about
    with pytest.raises(FormatError, match="not a hashnet index"):
        storage.check_format(about, path, "index", 1)
    with pytest.raises(FormatError, match="upgrade hashnet"):
        storage.check_format({**about, "format_version": 2}, path, "codes", 1)
    storage.write_bytes(path, b"{")
    with pytest.raises(FormatError, match="not JSON"):
        storage.read_json(path)


def test_a_local_copy_of_a_local_file_is_the_file(tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    with storage.local_copy(str(tmp_path / "x")) as path:
        assert path == tmp_path / "x"


@pytest.mark.parametrize(
    "uri",
    [
        "s3://AKIAEXAMPLE:abc%2Fhidden@bucket/run/config.yaml",
        "s3://AKIAEXAMPLE@bucket/run/config.yaml",
        "abfss://container:hidden@account.dfs.core.windows.net/run",
        "abfs://:hidden@account.blob.core.windows.net/container/run",
        "s3://bucket/run?region=eu-west-1&secret_key=hidden",
        "s3://bucket/run?access_key=AKIAEXAMPLE",
        "s3://bucket/run?session_token=hidden",
        "s3://bucket/run?PassWord=hidden",
        "s3://bucket/run?secret%5Fkey=hidden",
        "abfss://container@account.dfs.core.windows.net/run?client_secret=hidden",
        "abfss://container@account.dfs.core.windows.net/run?sv=2025-01-05&sig=hidden",
    ],
)
def test_credentials_in_a_uri_are_refused_and_not_repeated(uri):
    with pytest.raises(StorageError, match="never in a URI") as refused:
        storage.read_bytes(uri)
    assert "hidden" not in str(refused.value)
    assert "AKIAEXAMPLE" not in str(refused.value)


def test_azures_container_before_the_host_is_no_credential():
    filesystem, path = storage.resolve("abfss://photos@account.dfs.core.windows.net/runs/demo")
    assert (filesystem.type_name, path) == ("abfs", "photos/runs/demo")
    anonymous = "abfss://photos@account.dfs.core.windows.net/runs/demo?credential_kind=anonymous"
    assert storage.resolve(anonymous)[1] == "photos/runs/demo"


def test_options_that_are_no_secret_pass():
    uri = "s3://bucket/runs/demo?endpoint_override=127.0.0.1:9000&scheme=http&region=us-east-1"
    assert storage.resolve(uri)[1] == "bucket/runs/demo"
