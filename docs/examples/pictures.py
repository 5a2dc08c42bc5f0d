"""Your own pictures, on a laptop: learn codes from the names of their folders, then find what looks alike.

    python docs/examples/pictures.py PICTURES query.jpg     # PICTURES/cat/1.jpg, PICTURES/dog/2.jpg, …

Without folders (PICTURES/1.jpg, …) it learns without labels. The model is kept in runs/pictures/model.
"""

import sys
from pathlib import Path

import hashnet

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python docs/examples/pictures.py PICTURES query.jpg")
    folder, query = Path(sys.argv[1]), sys.argv[2]
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        sys.exit(f"there is no picture below {folder}")
    names = [path.parent.name for path in paths]
    classes = sorted(set(names))
    labels = [classes.index(name) for name in names] if len(classes) > 1 else None

    model = hashnet.HashNet(n_bits=64).fit(paths, labels)
    model.save("runs/pictures/model")  # hashnet.Encoder.load opens it again
    index = hashnet.BinaryIndex.from_arrays(model.encode(paths))
    hits = index.search(model.encode(query), k=10)
    for place, distance in zip(hits.ids[0], hits.distances[0], strict=True):
        print(f"{distance:3d} bits  {paths[place]}")


if __name__ == "__main__":
    main()
