"""VTAB's aerial images: EuroSAT and Resisc45, with classes as folders of an archive.

In: EuroSAT's zip; Resisc45's RAR or zip. Neither has an official split: VTAB cuts the hashed order 60 : 20 : 20.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from pipelines.spec.vtab import VtabSource
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Files, Listing
from ray_jobs.sources.vtab import splits
from ray_jobs.sources.vtab.splits import Records
from vit_model.errors import UserError

_EUROSAT = """
AnnualCrop Forest HerbaceousVegetation Highway Industrial Pasture PermanentCrop Residential River SeaLake
"""
_RESISC45 = """
airplane airport baseball_diamond basketball_court beach bridge chaparral church circular_farmland cloud
commercial_area dense_residential desert forest freeway golf_course ground_track_field harbor industrial_area
intersection island lake meadow medium_residential mobile_home_park mountain overpass palace parking_lot railway
railway_station rectangular_farmland river roundabout runway sea_ice ship snowberg sparse_residential stadium
storage_tank tennis_court terrace thermal_power_station wetland
"""
CLASS_NAMES: dict[str, tuple[str, ...]] = {"eurosat": tuple(_EUROSAT.split()), "resisc45": tuple(_RESISC45.split())}
_IMAGE = re.compile(r"(?:.*/)?([^/]+)/\1_\d+\.jpg")


def listing(source: VtabSource, files: Files) -> Listing:
    """List the records that VTAB uses of `<any folder>/<class>/<class>_<number>.jpg`; other members are ignored."""
    names = CLASS_NAMES[source.task]
    [archive] = files
    keys, labels, members = [], [], []
    for member in containers.members(files, archive):
        if match := _IMAGE.fullmatch(member.path):
            if (label := match[1]) not in names:
                raise UserError(f"{archive} has {member.path}, but {source.name} has no class {label!r}")
            keys.append(f"{label}_{PurePosixPath(member.path).name}")
            labels.append(names.index(label))
            members.append(member)
    if not keys:
        raise UserError(f"{archive} contains no images <class>/<class>_<number>.jpg of {source.name}")
    return splits.listing(source, names, {"train": Records(keys, labels, members)})
