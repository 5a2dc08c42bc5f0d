"""What fine-tuning the last blocks of a backbone adds to a frozen one, by number of training pictures.

    python tests/bench/finetune.py DATA FOLDER [KEY=VALUE …] [--both KEY=VALUE …] [--rows 500,1000,2000]
        [--last 2] [--seconds 500]

DATA is a folder with train.txt, query.txt, database.txt and the pictures that they list (see `hashnet dataset
listfile`). For each number of training pictures, a nested draw, HashNet+C learns at 48 bits by the defaults
for EfficientNet-Lite0: the head alone on frozen features, with its settings searched as jobs/train.py does,
and the last blocks with the head. Both have the same queries and database; the difference of MAP@1000 comes
with the 95 % interval of a paired bootstrap over queries. One JSON row per number of pictures. KEY=VALUE
changes a key of jobs/train.py for the fine-tuned model, after --both for both: ``--both hidden=0`` compares
them with one linear layer.

What lies below the last blocks is computed once, for the centre crop of every picture and for a few augmented
views of the training pictures. Everything is kept in FOLDER: the same command goes on where an earlier one
stopped, and ``--seconds`` stops it early.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hashnet.codes import pack_signs
from hashnet.data import Manifest, make_manifest
from hashnet.encoding import BackboneFeatures
from hashnet.io import config as configs
from hashnet.losses import LabelSimilarity, make_loss
from hashnet.metrics import evaluate, paired_difference
from hashnet.models import BackboneSpec, HashModel, build_model, divide
from hashnet.training import KINDS, ArraySource, Callbacks, TrainConfig, fit, open_rows
from hashnet.training.checkpoints import Checkpoints
from hashnet.training.frozen_backbone import (
    adopt_head,
    head_settings,
    last_blocks,
    probe_of,
    standardise,
    train_head_first,
)
from hashnet.training.inputs import ViewSource, picture_reader
from hashnet.training.recipe_search import find_recipe

BITS, K, CHUNK = 48, 1000, 250  # CHUNK: pictures whose activations are kept at a time


class OutOfTime(Exception):
    """The time of ``--seconds`` is over; what was done is kept."""


class Study:
    def __init__(
        self, data: str, folder: Path, last: int, until: float, changes: list[str], both: list[str]
    ) -> None:
        self.folder, self.until, self.last, self.changes, self.both = folder, until, last, changes, both
        uri = str(folder / "manifest.parquet")
        if not (folder / "manifest.parquet" / "_manifest.json").exists():
            make_manifest("listfile", uri, path=data, root=data)
        self.manifest = Manifest.open(uri)
        self.rows = {
            split: open_rows(self.manifest, split, self._model(), self._config(1, frozen=True))
            for split in ("train", "query", "database")
        }

    def _config(self, n: int, frozen: bool) -> TrainConfig:
        keys = [
            f"run={self.folder}",
            "backbone=lite0",
            "weights=pretrained",
            "variant=hashnet+c",
            f"n_bits={BITS}",
            *self.both,
        ]
        keys += ["freeze_backbone=true"] if frozen else [f"train_last={self.last}", *self.changes]
        return configs.load(TrainConfig, None, keys).resolved("image", n)

    def _model(self, frozen: bool = False) -> HashModel:
        torch.manual_seed(0)
        config = self._config(1, frozen)
        noise = KINDS["features"].noise if config.noise is None else config.noise
        chosen = {name: getattr(config, name) for name in ("dropout", "min_area")}
        return build_model("lite0", BITS, weights="pretrained", noise=noise, **chosen)

    def _check_time(self) -> None:
        if time.monotonic() > self.until:
            raise OutOfTime

    def activations(self, split: str, view: int | None) -> tuple[np.ndarray, tuple[int, ...]]:
        """float16 (n, width) below the last blocks, of the centre crops or of a view; a chunk at a time."""
        model = self._model().eval()
        parts = divide(model.backbone, self.last, model.spec.preprocess.crop)
        width = math.prod(parts.shape)
        below = HashModel(
            nn.Sequential(parts.lower, nn.Flatten()),
            BackboneSpec("image", width, preprocess=model.spec.preprocess),
            8,
        )
        features = BackboneFeatures(
            below, self.manifest, folder=str(self.folder / "cache"), dtype=np.float16, max_bytes=1 << 40
        )
        config = self._config(1, frozen=False)
        rows = open_rows(self.manifest, split, model, config, train=view is not None)
        kept = features if view is None else features.of_view(config.seed, view)
        values = np.zeros((len(rows), width), np.float16)
        for start in range(0, len(rows), CHUNK):
            at = np.arange(start, min(start + CHUNK, len(rows)))
            if kept.missing(rows.row_ids[at]):
                self._check_time()
            values[at], usable = kept(rows.row_ids[at], picture_reader(rows.source, at, view or 0))
            assert usable.all()
        return values, parts.shape

    def features(self, model: HashModel, split: str) -> np.ndarray:
        """The backbone's features of the centre crops, float32 (n, d), with its last blocks as they are."""
        values, shape = self.activations(split, None)
        upper = divide(model.eval().backbone, self.last, model.spec.preprocess.crop).upper.eval()
        with torch.inference_mode():
            found = [
                upper(torch.from_numpy(values[i : i + 64].astype(np.float32)).view(-1, *shape)
                      .contiguous(memory_format=torch.channels_last))
                for i in range(0, len(values), 64)
            ]  # fmt: skip
        return torch.cat(found).numpy()

    def train(self, n: int, frozen: bool) -> dict[str, object]:
        """Average precisions of a training on n pictures, kept in FOLDER."""
        name = "-".join(
            [
                "frozen" if frozen else f"last-{self.last}",
                str(n),
                *self.both,
                *([] if frozen else self.changes),
            ]
        )
        done = self.folder / f"{name}.json"
        if done.exists():
            return json.loads(done.read_text())
        self._check_time()
        started = time.process_time()
        config, model = self._config(n, frozen), self._model(frozen)
        chosen = np.sort(np.random.default_rng(0).permutation(len(self.rows["train"]))[:n])
        labels = self.rows["train"].labels[chosen]
        loss = make_loss(config, LabelSimilarity(labels))
        checkpoints = Checkpoints(str(self.folder / name))
        callbacks = Callbacks(epoch=lambda record: None if frozen else self._check_time())
        centres = ArraySource(self.features(model, "train")[chosen])
        # Both arms begin with the head that a search on held-out rows of the frozen features finds.
        alone = dataclasses.replace(head_settings(config), run=str(self.folder / name))
        recipe = find_recipe(alone, probe_of(model), centres, labels)
        probe = recipe.model(probe_of(model), config.seed)
        if frozen:
            learner, source = probe, centres
            config = dataclasses.replace(config, lr=recipe.lr)
            standardise(learner, centres)
        else:
            if not checkpoints.steps():
                train_head_first(model, probe, recipe.lr, centres, loss, alone, None, "cpu")
            parts = divide(model.backbone, self.last, model.spec.preprocess.crop)
            views = np.stack([self.activations("train", view)[0][chosen] for view in range(config.views)])
            source = ViewSource(views, parts.shape, np.ones(n, dtype=bool))
            learner = last_blocks(model, parts)
        every = 0 if frozen else 8  # the hash layer alone takes seconds
        settings = dataclasses.replace(config.fit_settings(), checkpoint_every=every, log_every=4)
        history = fit(
            learner,
            source,
            loss,
            config.make_stages(),
            settings,
            checkpoints=checkpoints,
            callbacks=callbacks,
        )
        if frozen:
            adopt_head(model, learner)
        codes = {}
        for split in ("query", "database"):
            with torch.inference_mode():
                scaled = (
                    torch.from_numpy(self.features(model, split)) - model.feature_mean
                ) / model.feature_std
                codes[split] = pack_signs(model.head(scaled))
        report = evaluate(
            codes["query"], self.rows["query"].labels, codes["database"], self.rows["database"].labels, K
        )
        made = {
            "map": report.map, "in_ball": report.precision_within(2), "ap": list(report.ap),
            "steps": len(history.steps["step"]), "cpu_s": time.process_time() - started,
            "J": [stage.J for stage in history.stages], "L": [stage.L for stage in history.stages],
        }  # fmt: skip
        done.write_text(json.dumps(made))
        return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("folder", type=Path)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--both", nargs="+", default=[], metavar="KEY=VALUE", help="keys of both models")
    parser.add_argument("--rows", default="500,1000,2000", help="numbers of training pictures")
    parser.add_argument("--last", type=int, default=2, help="blocks that learn")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="stop after this long, to go on later"
    )
    given = parser.parse_intermixed_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    try:
        until = time.monotonic() + given.seconds
        study = Study(given.data, given.folder, given.last, until, given.changes, given.both)
        for n in map(int, given.rows.split(",")):
            frozen, tuned = study.train(n, frozen=True), study.train(n, frozen=False)
            found = paired_difference(tuned["ap"], frozen["ap"])
            row = {
                "bench": "finetune", "pictures": n, "last": given.last, "changes": given.changes,
                "both": given.both,
                "map_frozen": round(frozen["map"], 4), "map_tuned": round(tuned["map"], 4),
                "difference": round(found.mean, 4), "interval": [round(found.low, 4), round(found.high, 4)],
                "in_ball": [round(frozen["in_ball"], 4), round(tuned["in_ball"], 4)],
                "cpu_s": [round(frozen["cpu_s"], 1), round(tuned["cpu_s"], 1)],
            }  # fmt: skip
            print(json.dumps(row), flush=True)
    except OutOfTime:
        print("out of time: start the same command again to go on", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
