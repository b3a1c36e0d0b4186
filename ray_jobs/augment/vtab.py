"""The augmentation of VTAB's tasks in fine-tuning: BiT's crop and flip, unless one would change the label.

Source: BiT (arXiv 1912.11370), appendix F.
"""

from __future__ import annotations

from pipelines.spec import Augmentation, nearest

POLICIES: dict[tuple[bool, bool], Augmentation] = {
    (True, True): "squash_crop_flip",
    (True, False): "squash_crop",
    (False, True): "flip",
    (False, False): "none",
}
# Whether there is a random crop, whether there is a flip.
SWITCHES = {
    "caltech101": (True, True),
    "cifar": (True, True),
    "dtd": (True, True),
    "oxford_flowers102": (True, True),
    "oxford_iiit_pet": (True, True),
    "svhn": (True, True),
    "sun397": (True, True),
    "patch_camelyon": (True, True),
    "eurosat": (True, True),
    "resisc45": (True, True),
    "diabetic_retinopathy": (True, True),
    "clevr_count": (False, True),
    "clevr_dist": (False, True),
    "dmlab": (False, True),
    "kitti": (False, True),
    "dsprites_loc": (False, False),
    "dsprites_ori": (True, False),
    "smallnorb_azi": (True, False),
    "smallnorb_ele": (True, True),
}


def vtab_policy(task: str) -> Augmentation:
    """Return the augmentation of a VTAB task, by the name of its folder in the usual copies of VTAB-1k.

    Raises ValueError for an unknown name.
    """
    if task not in SWITCHES:
        raise ValueError(f"unknown VTAB task {task!r}{nearest(task, SWITCHES)}")
    return POLICIES[SWITCHES[task]]
