"""What a training's speed is measured on: images that the loader really reads."""

from pathlib import Path

from ray_jobs.training.cost import _random_dataset
from vit_model.contract import Preprocessing


def test_the_measured_images_are_a_dataset_like_any_other(tmp_path: Path) -> None:
    dataset = _random_dataset(tmp_path, 8, 6)
    half = (0.5,) * 3
    images = dataset.images("train", Preprocessing(mean=half, std=half, resolution=8, channels=3))
    assert images.shape == (6, 8, 8, 3) and len({image.tobytes() for image in images}) == 6
    assert sorted(dataset.labels("train").tolist()) == [0, 0, 0, 1, 1, 1]
