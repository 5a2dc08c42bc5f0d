"""The header that every artefact shares: written last, sealed, refused when it was changed."""

import json
import shutil

import pytest

from hashnet.errors import DataError, FormatError
from hashnet.io import Artefact, storage


class Note(Artefact):
    kind, header_file = "note", "note.json"
    made_by = "write one"
    error = DataError

    def open(self):
        return storage.read_bytes(storage.join(self.uri, "text")).decode()

    def write(self, text):
        storage.write_bytes(storage.join(self.uri, "text"), text.encode())
        digest = storage.sha256_of(storage.join(self.uri, "text"))
        self.write_header({"length": len(text), "text": digest}, sha256=digest, lineage={"by": "hand"})

    def files(self, values):
        return {"text": values["text"]}

    def facts(self, values):
        return {"length": values["length"]}


@pytest.fixture
def note(tmp_path):
    made = Note(str(tmp_path / "note"))
    made.write("hello")
    return made


def test_the_header_says_what_it_is(note):
    assert note.exists()
    header = note.header()
    assert (header.kind, header.format_version, header.lineage) == ("note", 1, {"by": "hand"})
    assert header.files == {"text": header.sha256}
    described = note.describe()
    assert (described.kind, described.facts, described.lineage) == ("note", {"length": 5}, {"by": "hand"})
    assert note.verify() == []


def test_a_copy_is_whole_and_a_damaged_one_is_not_copied(note, tmp_path):
    note.copy_to(str(tmp_path / "copy"))
    copy = Note(str(tmp_path / "copy"))
    assert (copy.open(), copy.header(), copy.verify()) == ("hello", note.header(), [])
    (tmp_path / "note" / "text").write_text("hallo")
    with pytest.raises(FormatError, match="text is damaged"):
        note.copy_to(str(tmp_path / "second"))
    assert not Note(str(tmp_path / "second")).exists()


def test_a_damaged_or_missing_file_is_named(note, tmp_path):
    (tmp_path / "note" / "text").write_text("hallo")
    (problem,) = note.verify()
    assert problem.startswith("text is damaged: its sha256 is ")
    (tmp_path / "note" / "text").unlink()
    assert note.verify() == ["text is missing"]


@pytest.mark.parametrize("change", [{"length": 6}, {"sha256": "00"}, {"lineage": {}}, {"extra": 1}])
def test_a_header_that_was_edited_is_refused(note, tmp_path, change):
    path = tmp_path / "note" / "note.json"
    path.write_text(json.dumps(json.loads(path.read_text())))  # other spaces are no change
    note.read()
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FormatError, match=r"was changed or damaged .* seal does not fit .* or write one"):
        note.read()


def test_headers_without_a_seal_are_older_and_read(note, tmp_path):
    path = tmp_path / "note" / "note.json"
    values = json.loads(path.read_text())
    del values["seal"], values["lineage"]
    path.write_text(json.dumps(values))
    assert note.header().lineage == {}


def test_foreign_newer_and_missing_ones_are_refused(note, tmp_path):
    path = tmp_path / "note" / "note.json"
    whole = json.loads(path.read_text())
    for change, message in (({"kind": "model"}, "not a hashnet note"), ({"format_version": 2}, "upgrade")):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(FormatError, match=message):
            note.read()
    path.unlink()
    with pytest.raises(DataError, match=r"holds no note \(it has no note\.json\); write one"):
        note.read()
    shutil.rmtree(path.parent)
    with pytest.raises(DataError, match=r"holds no note \(it does not exist\); write one"):
        note.read()
