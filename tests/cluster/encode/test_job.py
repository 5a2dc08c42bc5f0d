"""jobs/encode_db.py as a command: its help, its last line, its exit codes; and a run on an object store."""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest
import torch

from cluster.encode import EncodeConfig
from cluster.runtime.job import read_settings
from hashnet import CodeStore, Encoder, Manifest
from hashnet.data.sources import make_manifest
from hashnet.errors import ConfigError
from hashnet.io import storage
from hashnet.models.bundle import save_bundle
from hashnet.models.hash_model import build_model


@pytest.fixture
def job(python, repo):
    """Runs the command; gives (exit code, standard output, standard error)."""

    def run(*words: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [python, "jobs/encode_db.py", *words],
            cwd=repo, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


def make_run(uri: str, local: str) -> None:
    """A run with the embedded digits as features, made locally and copied to ``uri``."""
    make_manifest("digits", local, modality="features").copy_to(storage.join(uri, "manifest.parquet"))
    torch.manual_seed(0)
    save_bundle(storage.join(uri, "model"), build_model("features", 48, n_features=64))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine=auto"], "engine is now called device: write device=auto"),
        (["engine=cpu-eager"], "engine is now called device: write device=cpu compile=false"),
        (["device=cuda", "compile=true"], "compile=true is for the CPU: leave it out with device=cuda"),
        (["device=cpu", "decode=nvjpeg"], "decode=nvjpeg is for GPUs: leave it out with device=cpu"),
        (["compile=false", "decode=nvjpeg"], "decode=nvjpeg is for GPUs: leave it out with"),
        (["device=cpu", "gpus_per_actor=0.5"], "gpus_per_actor=0.5 has no meaning with device=cpu"),
        (["device=cuda", "gpus_per_actor=0"], "gpus_per_actor=0 contradicts device=cuda"),
        (["only_failed=true", "dry_run=true"], "only_failed and dry_run cannot be combined"),
    ],
)
def test_settings_that_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        read_settings(EncodeConfig, ["run=/r", *words])


def test_help_names_every_key(job):
    code, out, _ = job("--help")
    assert code == 0
    for word in ("run", "manifest", "dry_run", "only_failed", "max_bad_fraction", "rows_per_shard", "output"):
        assert f"  {word} " in out


def test_dry_run_prints_the_plan_and_mistakes_are_sentences(job, tmp_path):
    make_run(str(tmp_path / "run"), str(tmp_path / "m"))
    code, out, err = job(f"run={tmp_path}/run", "dry_run=true", "rows_per_shard=500")
    assert code == 0, err
    plan = json.loads(out.splitlines()[-1])
    assert (plan["rows"], plan["shards_to_do"], plan["n_bits"]) == (1600, 4, 48)
    assert "1,600 database rows" in err
    code, out, err = job(f"run={tmp_path}/run", "dry_runn=true", "max_bad_fraction=2")
    assert (code, out) == (2, "")
    assert "did you mean 'dry_run'?" in err
    assert "must be at most 1" in err
    assert "Traceback" not in err
    code, _, err = job(f"run={tmp_path}/nowhere")
    assert code == 2
    assert "holds no model" in err


@pytest.mark.slow
def test_a_run_on_an_object_store(job, bucket, tmp_path):
    """Model, manifest and codes on a real S3-speaking server: the same shards as on disk, and resumed."""
    run = storage.join(bucket, "demo")
    make_run(run, str(tmp_path / "m"))
    make_run(str(tmp_path / "run"), str(tmp_path / "m2"))
    code, out, err = job(f"run={run}", "rows_per_shard=500")
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    code, out, err = job(f"run={tmp_path}/run", "rows_per_shard=500")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["sha256"] == result["sha256"]
    store = CodeStore.open(storage.join(run, "codes"))
    rows = Manifest.open(storage.join(run, "manifest.parquet")).read("database")
    features = np.array(rows["feature"].to_pylist(), dtype=np.float32)
    assert np.array_equal(store.codes(), Encoder.load(storage.join(run, "model")).encode(features))
    storage.delete(storage.join(run, "codes", "_records", "codes-00001.json"))
    code, out, err = job(f"run={run}")
    assert code == 0, err
    again = json.loads(out.splitlines()[-1])
    assert (again["rows_encoded_now"], again["sha256"]) == (500, result["sha256"])
