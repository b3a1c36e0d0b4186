"""Examples of VTAB-1k's tasks."""

from pipelines.spec.vtab import TASKS
from tests.support.examples import LIBRARY, Example, written
from tests.support.vtab_archives import ARCHIVES
from tests.support.vtab_natural import natural

SPRITES = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.hdf5"
NORB = "smallnorb-5x46789x9x18x6x2x96x96-training"
PATCHES = "camelyonpatch_level_2_split_train"
FUZZED = {
    "caltech101": {"caltech-101.zip": 0.1},
    "cifar": {"cifar-100-python.tar.gz": 0.3},
    "dtd": {"dtd-r1.0.1.tar.gz": 1.0},
    "oxford_flowers102": {"setid.mat": LIBRARY},
    "oxford_iiit_pet": {"annotations.tar.gz": 1.0},
    "svhn": {"train_32x32.mat": LIBRARY},
    "sun397": {"sun397_tfds_tr.txt": 1.0},
    "patch_camelyon": {f"{PATCHES}_y.h5.gz": LIBRARY},
    "eurosat": {"EuroSAT.zip": 1.0},
    "diabetic_retinopathy": {"train.zip.001": 1.0, "retinopathy_solution.csv": 1.0},
    "clevr_dist": {"CLEVR_v1.0.zip": 0.5},
    "dmlab": {"dmlab.tar.gz": 1.0},
    "kitti": dict.fromkeys(("data_object_image_2.zip", "data_object_label_2.zip", "devkit_object.zip"), 0.5),
    "dsprites_loc": {SPRITES: LIBRARY},
    "smallnorb_azi": {f"{NORB}-info.mat.gz": 0.5, f"{NORB}-dat.mat.gz": 0.2},
}


def files(task: str) -> dict[str, bytes]:
    return written(ARCHIVES[task]) if task in ARCHIVES else natural(task)


EXAMPLES = [
    Example(
        task,
        {"kind": "vtab", "task": task},
        lambda task=task: files(task),
        fuzzed=FUZZED.get(task, {}),
        images=-1,
    )
    for task in TASKS
]
