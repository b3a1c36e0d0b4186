"""How VTAB bins the labels of its structured tasks: the intervals at their boundaries."""

import json

import numpy as np
import pytest

from ray_jobs.sources.vtab.scene_labels import clevr_count, clevr_distance, clevr_scenes, kitti_drives, kitti_label
from ray_jobs.sources.vtab.splits import hash_order
from ray_jobs.sources.vtab.synthetic import CLASS_NAMES, location, orientation
from vit_model.errors import UserError


@pytest.mark.slow
def test_dsprites_has_the_published_labels() -> None:
    """The first 12 of train800, from the keys alone: a record's number says its latents, y fastest."""
    first = hash_order("train", range(737_280))[:12]
    _, _, _, turns, xs, _ = np.unravel_index(first, (1, 3, 6, 40, 32, 32))
    assert location(xs).tolist() == [0, 0, 7, 6, 7, 11, 7, 5, 6, 14, 5, 3]
    assert orientation(turns).tolist() == [6, 8, 0, 7, 9, 12, 14, 1, 14, 15, 3, 13]


def test_dsprites_bins_are_even_for_location_and_uneven_for_orientation() -> None:
    assert np.bincount(location(np.arange(32))).tolist() == [2] * 16
    turns = orientation(np.arange(40))
    assert turns[:10].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert np.bincount(turns).tolist() == [3, 2] * 8
    assert turns.tolist() == [int(turn / 2.5) for turn in range(40)]
    for label, name in enumerate(CLASS_NAMES["dsprites_ori"]):
        members = np.flatnonzero(turns == label)
        assert name == f"turn {members[0]} to {members[-1]}"


def scene(*depths: float) -> dict[str, object]:
    objects = [{"pixel_coords": [10, 20, depth], "3d_coords": [0, 0, 1], "color": "red"} for depth in depths]
    return {"image_filename": "CLEVR_train_000000.png", "objects": objects, "relationships": {"left": [[1], []]}}


@pytest.mark.parametrize(
    ("depth", "label"),
    [
        *((0.001, 0), (8, 0), (8.001, 1), (8.5, 1), (8.501, 2), (9, 2), (9.001, 3), (9.5, 3)),
        *((9.501, 4), (10, 4), (10.001, 5), (100, 5)),
    ],
)
def test_clevrs_intervals_have_their_upper_end(depth: float, label: int) -> None:
    assert clevr_distance(scene(depth + 3, depth, 200)) == label


@pytest.mark.parametrize("depth", [0, -1, 100.001, float("nan")])
def test_clevr_has_no_other_distances(depth: float) -> None:
    with pytest.raises(ValueError, match="is not"):
        clevr_distance(scene(depth))


def test_clevr_counts_from_three_to_ten() -> None:
    assert [clevr_count(scene(*range(1, number + 1))) for number in range(3, 11)] == list(range(8))
    for number in (2, 11):
        with pytest.raises(ValueError, match=f"has {number} objects, not 3 to 10"):
            clevr_count(scene(*range(1, number + 1)))


@pytest.mark.parametrize("indent", [None, 1])
def test_scenes_are_read_in_their_order(indent: int | None) -> None:
    given = [scene(1.5, number) | {"image_filename": f"ü{number}\\.png"} for number in range(5)]
    others = {"info": {"scenes": [1, {"a": "]}"}], "version": "1.0"}, "number": 12345}
    text = json.dumps(others | {"scenes": given}, indent=indent, ensure_ascii=False).encode()
    found = clevr_scenes(text)
    assert [one["image_filename"] for one in found] == [one["image_filename"] for one in given]
    assert [one["objects"][1] for one in found] == [{"pixel_coords": [10, 20, number]} for number in range(5)]


def test_other_json_is_refused() -> None:
    text = json.dumps({"info": {}, "scenes": [scene(1.0)] * 3}).encode()
    for data, message in (
        *((text[:size], "is not the JSON of CLEVR's scenes, or is truncated") for size in range(len(text))),
        (b'{"info": 1}', "no list of scenes"),
        (b'{"scenes": {}}', "no list of scenes"),
        (b"[1]", "no list of scenes"),
        (b"[" * 100_000, "is not the JSON"),
        (b'{"scenes": [' + b"[" * 100_000, "is not the JSON"),
        (b'{"scenes": [{"objects": []}]}', "without image_filename"),
        (b'{"scenes": [{"image_filename": "a.png"}]}', "no objects for a.png"),
        (b'{"scenes": [\xff\xff]}', "is not the JSON"),
    ):
        with pytest.raises(UserError, match=message):
            clevr_scenes(data)


def line(kind: str, z: float) -> str:
    return f"{kind} 0.00 0 -1.58 587.01 173.33 614.12 200.12 1.65 1.67 3.64 -0.65 1.71 {z:.2f} -1.59"


@pytest.mark.parametrize(
    ("objects", "label"),
    [
        *(([("Car", z)], label) for z, label in ((8, 0), (8.01, 1), (20, 1), (20.01, 2), (150, 2), (-3, 0))),
        ([("Van", 30), ("Truck", 12)], 1),
        ([("Tram", 5), ("Pedestrian", 2), ("Person_sitting", 2), ("Cyclist", 3), ("Misc", 1)], 3),
        ([("DontCare", -1000), ("Car", 25)], 2),
        ([], 3),
    ],
)
def test_kittis_label_is_the_nearest_vehicle(objects: list[tuple[str, float]], label: int) -> None:
    assert kitti_label("".join(line(*one) + "\n" for one in objects)) == label


@pytest.mark.parametrize(
    "text", ["Car 1 2 3", line("Lorry", 3), line("Car", 3) + " 0.9", line("Car", 3).replace("3.00", "x")]
)
def test_other_lines_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"15 columns|could not convert"):
        kitti_label(text)


def test_kittis_drives_come_through_both_lists() -> None:
    mapping = "".join(
        f"2011_09_26 2011_09_26_drive_{drive} {frame:010d}\n"
        for drive, frame in (("0001_sync", 5), ("0002_sync", 7), ("0001_sync", 9))
    )
    drives = kitti_drives("3,1,2,2\n", mapping)
    assert [drive[-9:-5] for drive in drives] == ["0001", "0001", "0002", "0002"]
    for rand, message in (("0,1", "'0'"), ("4", "'4'"), ("1,x", "'x'"), ("", "''")):
        with pytest.raises(ValueError, match=f"{message} is not the number of a line"):
            kitti_drives(rand, mapping)
    with pytest.raises(ValueError, match=r"line 1 of train_mapping\.txt"):
        kitti_drives("1", "2011_09_26 0001")
