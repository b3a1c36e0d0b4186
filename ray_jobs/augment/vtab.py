"""The augmentation of VTAB's tasks in fine-tuning: BiT's crop and flip, unless one would change the label.

Source: BiT (arXiv 1912.11370), appendix F.
"""

from __future__ import annotations

from pipelines.spec import Augmentation
from pipelines.spec.vtab import TASKS, WHOLE
from vit_model.errors import UserError

_WITHOUT_FLIP = ("dsprites_loc", "dsprites_ori", "smallnorb_azi")
_WITHOUT_CROP = ("clevr_count", "clevr_dist", "dmlab", "dsprites_loc", "kitti")


def augmentation(title: str) -> Augmentation:
    """Return the augmentation of a VTAB task, by the name of its data set in reports.

    Raises:
        UserError: no task has this name.
    """
    titles = {files.title: task for task, files in TASKS.items()}
    task = titles.get(title.removesuffix(WHOLE))
    if task is None:
        raise UserError(f"augment vtab needs a task of VTAB-1k, but the data set is {title}")
    if task in _WITHOUT_CROP:
        return "none" if task in _WITHOUT_FLIP else "flip"
    return "squash_crop" if task in _WITHOUT_FLIP else "squash_crop_flip"
