"""The grammar of every job: settings, exit codes, the last line."""

import dataclasses
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from cluster.build_index import IndexConfig
from cluster.compare.compare_config import CompareConfig
from cluster.demo import DemoConfig
from cluster.encode.job import EncodeConfig
from cluster.evaluate import EvaluateConfig
from cluster.runtime import job
from hashnet.errors import ClusterError, ConfigError, DataError
from hashnet.io.config import REQUIRED, key
from hashnet.server.settings import ServeConfig
from hashnet.training.train_config import TrainConfig


@dataclass(frozen=True)
class Settings:
    run: str = key(REQUIRED, "run folder", path=True)
    k: int = key(10, "results a query")


def end_of(function, argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        job.run_job(Settings, function, argv)
    return stopped.value.code, *capsys.readouterr()


def test_the_last_line_is_the_result(capsys):
    code, out, _ = end_of(lambda s: print("working") or {"run": s.run, "k": s.k}, ["run=/r", "k=3"], capsys)
    assert code == 0
    assert json.loads(out.splitlines()[-1]) == {"run": "/r", "k": 3}


def test_a_mistake_is_a_sentence_and_code_2(capsys):
    code, out, err = end_of(lambda s: {}, ["k=none", "runn=1"], capsys)
    assert code == 2
    assert out == ""
    assert "did you mean 'run'?" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("address", "seen"), [("10.0.0.1:6379", ""), (None, "0,1")])
def test_in_a_cluster_the_driver_sees_no_gpu(address, seen, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    _, out, _ = end_of(lambda _: {"seen": os.environ["CUDA_VISIBLE_DEVICES"]}, ["run=/r"], capsys)
    assert json.loads(out.splitlines()[-1]) == {"seen": seen}


def raising(error):
    def function(_):
        raise error

    return function


def test_known_failures_have_no_stack_trace_and_unknown_ones_do(capsys):
    code, _, err = end_of(raising(DataError("row 3 of x.txt has 79 labels")), ["run=/r"], capsys)
    assert (code, err) == (2, "error: row 3 of x.txt has 79 labels\n")
    code, _, err = end_of(raising(RuntimeError("surprise")), ["run=/r"], capsys)
    assert code == 1
    assert "Traceback" in err
    assert "surprise" in err


def test_what_ran_and_failed_is_a_sentence_and_code_1(capsys):
    code, _, err = end_of(raising(ClusterError("1 of 2 cells failed")), ["run=/r"], capsys)
    assert (code, err) == (1, "error: 1 of 2 cells failed\n")


def test_an_error_wrapped_by_ray_is_unwrapped(capsys):
    wrapper = RuntimeError("RayTaskError")
    wrapper.cause = DataError("row 3")
    code, _, err = end_of(raising(wrapper), ["run=/r"], capsys)
    assert (code, err) == (2, "error: row 3\n")


def test_an_error_that_ray_passes_on_is_its_sentence_alone(capsys):
    from ray.exceptions import RayTaskError

    passed_on = RayTaskError("work", "Traceback: in a worker", DataError("row 3")).as_instanceof_cause()
    assert isinstance(passed_on, DataError)
    assert end_of(raising(passed_on), ["run=/r"], capsys)[::2] == (2, "error: row 3\n")


def test_an_error_of_a_training_worker_is_found(capsys):
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback
    from ray.train.v2.api.exceptions import WorkerGroupError

    of_ranks = {0: RuntimeError("connection reset"), 1: UserExceptionWithTraceback(DataError("row 3"), "…")}
    failed = WorkerGroupError("two ranks", of_ranks)
    assert end_of(raising(failed), ["run=/r"], capsys)[::2] == (2, "error: row 3\n")


def test_a_node_without_memory_is_said_in_a_sentence(capsys):
    said = "4 worker(s) were killed due to the node running low on memory. Memory on the node was 22.40GB"
    code, _, err = end_of(raising(RuntimeError(said)), ["run=/r"], capsys)
    assert code == 1
    assert "a smaller batch_size" in err
    assert "Traceback" not in err


def test_a_node_that_cannot_unpack_the_jobs_files_is_said_in_a_sentence(capsys):
    from ray.exceptions import RuntimeEnvSetupError

    full = RuntimeEnvSetupError("OSError: [Errno 28] No space left on device")
    code, _, err = end_of(raising(full), ["run=/r"], capsys)
    assert code == 1
    assert "restart its Ray" in err
    assert "Traceback" not in err


def test_errors_that_are_each_other_s_cause_come_to_an_end(capsys):
    outer, inner = RuntimeError("an actor died"), ValueError("in its constructor")
    outer.cause, inner.__cause__ = inner, outer
    code, _, err = end_of(raising(outer), ["run=/r"], capsys)
    assert code == 1
    assert "an actor died" in err
    inner.cause = DataError("row 3")
    assert end_of(raising(outer), ["run=/r"], capsys)[2] == "error: row 3\n"


def test_an_interrupt_says_how_to_go_on(capsys):
    code, _, err = end_of(raising(KeyboardInterrupt()), ["run=/r"], capsys)
    assert code == 130
    assert "run the same command again" in err


def test_flags_other_than_config_are_refused():
    with pytest.raises(ConfigError, match="unknown flag --k"):
        job.read_settings(Settings, ["--k", "3"])
    with pytest.raises(ConfigError, match="needs a file"):
        job.read_settings(Settings, ["--config"])


def test_a_config_file_and_overrides(tmp_path):
    (tmp_path / "c.yaml").write_text("run: /a\nk: 5\n")
    assert job.read_settings(Settings, ["--config", str(tmp_path / "c.yaml"), "k=7"]) == Settings("/a", 7)
    assert job.read_settings(Settings, [f"--config={tmp_path}/c.yaml"]) == Settings("/a", 5)


def test_relative_outputs_are_refused_in_a_submitted_job(monkeypatch):
    words = ["run=runs/demo", "query_codes=q", "out=report"]
    job.read_settings(EvaluateConfig, words)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")  # what Ray's job supervisor sets
    for good in ("/abs/run", "s3://bucket/run"):
        job.read_settings(EvaluateConfig, [f"run={good}", f"out={good}"])
    with pytest.raises(ConfigError) as caught:
        job.read_settings(EvaluateConfig, words)
    assert [m.partition(" is relative, and")[0] for m in caught.value.mistakes] == words
    assert "working directory is deleted afterwards; give an absolute path" in caught.value.mistakes[2]


def test_paths_that_a_run_records_are_absolute_in_a_submitted_job_and_other_inputs_need_not(monkeypatch):
    monkeypatch.setenv(job.SUBMITTED, "{}")
    words = ["run=/r", "manifest=m.parquet", "base_uri=pictures", "weights=pretrained", "pairs=none"]
    assert job.read_settings(TrainConfig, words).manifest.endswith("/m.parquet")
    with pytest.raises(ConfigError) as caught:
        job.read_settings(TrainConfig, ["run=/r", "pairs=clicks.csv", "weights=mine.pth"])
    first, second = caught.value.mistakes
    assert first.startswith(
        "pairs=clicks.csv is relative, and a submitted job's working directory changes each time"
    )
    assert second.startswith("weights=mine.pth is relative")


def test_every_path_of_every_job_is_known_as_output_or_input():
    """A new key that names an output must be added to ``job.OUTPUTS``, or a submitted job loses it."""
    inputs = {
        "manifest", "base_uri", "model", "codes", "index", "beside", "settings", "zero_shot_manifest",
        "images", "tls_cert", "tls_key", "cache",
    }  # fmt: skip
    jobs = (TrainConfig, EncodeConfig, IndexConfig, EvaluateConfig, CompareConfig, ServeConfig, DemoConfig)
    named = {f.name for cls in jobs for f in dataclasses.fields(cls) if f.metadata.get("path")}
    assert named == inputs | set(job.OUTPUTS) | set(job.RECORDED)


def all_jobs(repo):
    return sorted(p for p in (repo / "jobs").glob("*.py") if p.name != "__init__.py")


def test_every_job_helps_however_it_is_started(repo, python, tmp_path):
    ways = [([python, str(path)], tmp_path) for path in all_jobs(repo)]
    ways.append(([python, "-m", "jobs.build_index"], repo))

    def ask(way):
        command, folder = way
        env = {"PATH": "/usr/bin:/bin"}
        return subprocess.run([*command, "--help"], cwd=folder, capture_output=True, text=True, env=env)

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(ask, ways):
            assert done.returncode == 0, done.stderr
            assert "run " in done.stdout
            assert "key=value" in done.stdout


def test_jobs_stay_thin(repo):
    for path in all_jobs(repo):
        assert len(path.read_text().splitlines()) <= 60, path


def test_drivers_start_without_torch(python, repo):
    """Importing it takes seconds; `--help`, and drivers whose workers do the work, go without."""
    ask = "import sys, cluster.encode.job, cluster.evaluate, cluster.sweep; print('torch' in sys.modules)"
    assert subprocess.check_output([python, "-c", ask], cwd=repo, text=True).strip() == "False"


def test_relative_paths_mean_this_folder_wherever_workers_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(job.SUBMITTED, raising=False)
    words = ["run=runs/a", "manifest=s3://bucket/m.parquet", "pairs=clicks.parquet", "backbone=small_cnn"]
    settings = job.read_settings(TrainConfig, words)
    assert settings.run == str(tmp_path / "runs/a")
    assert settings.pairs == str(tmp_path / "clicks.parquet")
    assert (settings.manifest, settings.backbone) == ("s3://bucket/m.parquet", "small_cnn")
    assert job.read_settings(ServeConfig, ["run=/r", "model=off"]).model == "off"
