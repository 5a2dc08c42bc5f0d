import pytest

from cluster.compare.compare_config import CompareConfig
from hashnet.io import config as configs
from hashnet.training.train_config import TrainConfig


@pytest.mark.parametrize("name", ["imagenet100", "nuswide", "coco", "cifar10", "digits"])
@pytest.mark.parametrize("cls", [TrainConfig, CompareConfig])
def test_a_preset_serves_training_and_comparison(name, cls, repo):
    config = configs.load(cls, str(repo / f"jobs/configs/{name}.yaml"), ["run=/tmp/somewhere"])
    assert config.backbone is not None


def test_a_comparison_passes_its_training_settings_on(repo):
    preset = str(repo / "jobs/configs/coco.yaml")
    config = configs.load(CompareConfig, preset, ["run=/tmp/somewhere", "lr=0.5", "bits=16"])
    train = config.train_config()
    assert type(train) is TrainConfig
    assert (train.backbone, train.lr) == ("alexnet", 0.5)
    assert config.features_from == "backbone"
