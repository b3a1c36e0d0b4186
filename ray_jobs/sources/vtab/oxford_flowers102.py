"""Flowers102: a tar of images and two MATLAB files, with labels and splits; all numbers count from 1."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipelines.spec.vtab import VtabSource
from ray_jobs.sources.archives.arrays import read_array
from ray_jobs.sources.archives.entries import Files, Listing
from ray_jobs.sources.vtab import archives, splits
from ray_jobs.sources.vtab.splits import Records
from vit_model.errors import UserError

_IMAGES = "102flowers.tgz"
_SPLITS = {"train": "trnid", "validation": "valid", "test": "tstid"}  # the train split is the small one
# By label; the archive has no names.
_NAMES = """
pink primrose, hard-leaved pocket orchid, canterbury bells, sweet pea, english marigold, tiger lily, moon orchid,
bird of paradise, monkshood, globe thistle, snapdragon, colt's foot, king protea, spear thistle, yellow iris,
globe-flower, purple coneflower, peruvian lily, balloon flower, giant white arum lily, fire lily, pincushion flower,
fritillary, red ginger, grape hyacinth, corn poppy, prince of wales feathers, stemless gentian, artichoke, sweet
william, carnation, garden phlox, love in the mist, mexican aster, alpine sea holly, ruby-lipped cattleya, cape
flower, great masterwort, siam tulip, lenten rose, barbeton daisy, daffodil, sword lily, poinsettia, bolero deep
blue, wallflower, marigold, buttercup, oxeye daisy, common dandelion, petunia, wild pansy, primula, sunflower,
pelargonium, bishop of llandaff, gaura, geranium, orange dahlia, pink-yellow dahlia?, cautleya spicata, japanese
anemone, black-eyed susan, silverbush, californian poppy, osteospermum, spring crocus, bearded iris, windflower,
tree poppy, gazania, azalea, water lily, rose, thorn apple, morning glory, passion flower, lotus, toad lily,
anthurium, frangipani, clematis, hibiscus, columbine, desert-rose, tree mallow, magnolia, cyclamen, watercress,
canna lily, hippeastrum, bee balm, ball moss, foxglove, bougainvillea, camellia, mallow, mexican petunia, bromelia,
blanket flower, trumpet creeper, blackberry lily
"""
CLASS_NAMES = tuple(name.strip() for name in _NAMES.replace("\n", " ").split(","))


def listing(source: VtabSource, files: Files) -> Listing:
    """List images of 102 classes, in the order of their numbers."""
    members = archives.by_path(files, _IMAGES)
    labels = _whole_numbers(files, "imagelabels.mat", "labels", len(CLASS_NAMES))
    parts: dict[str, Records] = {}
    for part, name in _SPLITS.items():
        numbers = _whole_numbers(files, "setid.mat", name, len(labels))
        keys = [f"image_{number:05d}.jpg" for number in numbers]
        images = [members.get(f"jpg/{key}") for key in keys]
        parts[part] = Records(keys, [int(labels[number - 1]) - 1 for number in numbers], images)
    return splits.listing(source, CLASS_NAMES, parts)


def _whole_numbers(files: Files, file: str, name: str, largest: int) -> NDArray[np.int64]:
    """Return the variable of this name, numbers from 1 to `largest`, [n]. Raises UserError for anything else."""
    numbers = read_array(files, file, name, np.number, (1, None)).reshape(-1)
    if not np.isin(numbers, range(1, largest + 1)).all():
        raise UserError(f"{file}: expected a variable {name} with numbers from 1 to {largest}")
    return numbers.astype(np.int64)
