"""VTAB-1k's table of tasks, against the benchmark's papers."""

import pytest

from pipelines.spec.vtab import TASKS, augmentation

# BiT (Kolesnikov et al. 2020), appendix F: {task: (flips, crops)} of those that do not have both
EXCEPTIONS = {
    "Clevr-Count": (True, False),
    "Clevr-Distance": (True, False),
    "DMLab": (True, False),
    "KITTI-Distance": (True, False),
    "dSprites-Location": (False, False),
    "dSprites-Orientation": (False, True),
    "sNORB-Azimuth": (False, True),
}


def test_flips_and_crops_are_left_out_where_they_would_change_the_label() -> None:
    for task in TASKS.values():
        policy = augmentation(task.title)
        flips, crops = EXCEPTIONS.get(task.title, (True, True))
        assert ("flip" in policy, "crop" in policy) == (flips, crops), task.title
    assert EXCEPTIONS.keys() < {task.title for task in TASKS.values()}
    with pytest.raises(ValueError, match="Fashion-MNIST is not one of them"):
        augmentation("Fashion-MNIST")
