"""An index on an object store: the same commands, the same answers."""

import numpy as np
import pytest

from hashnet import BinaryIndex, errors
from hashnet.index import IndexArtefact
from hashnet.io import storage


@pytest.mark.parametrize("kind", ["flat", "ivf"])
def test_an_index_on_s3_lives_like_one_on_disk(bucket, codes_of, kind):
    uri = storage.join(bucket, "run", kind, "index")
    codes = codes_of("clustered", 500, 64)
    writer = BinaryIndex.from_arrays(codes, labels=np.arange(500) % 4, kind=kind)
    writer.save(uri)
    reader = BinaryIndex.load(uri)
    assert reader.search(codes[:9], 20) == writer.search(codes[:9], 20)
    writer.add(codes[:3], [900, 901, 902])
    writer.remove([5, 6])
    assert IndexArtefact(reader.path).version() == 3
    assert reader.refresh()
    assert reader.search(codes[:9], 20) == writer.search(codes[:9], 20)
    writer.compact()
    assert reader.refresh()
    assert reader.search(codes[:9], 20) == writer.search(codes[:9], 20)
    file = storage.join(uri, "index-000004.faiss")
    storage.write_bytes(file, storage.read_bytes(file)[:-1] + b"x")
    with pytest.raises(errors.FormatError, match="is damaged: its sha256"):
        BinaryIndex.load(uri)
