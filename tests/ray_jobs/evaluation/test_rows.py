"""Tables: they read back as written, in the same bytes each time, and bad values are refused."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_jobs.evaluation.rows import (
    MEAN_IOU,
    PREDICTIONS,
    PROBABILITIES,
    REAL,
    ROWS,
    Row,
    Truth,
    digest_rows,
    measurement,
    scored,
    write_predictions,
    write_table,
)


def row(**changes: object) -> Row:
    return {
        "task": "digits",
        "protocol": "few-shot linear",
        "method": "pixels",
        "labels_per_class": 5,
        "draw": 0,
        "split": "test",
        "metric": "accuracy",
        "value": 0.1 + 0.2,
        "num_images": 540,
        "selected_on": "leave-one-out on the support",
        "settings": '{"l2": 8.0, "standardise": false}',
    } | changes


def prediction(**changes: object) -> Row:
    names = ("task", "protocol", "method", "labels_per_class", "draw")
    return (
        {name: row()[name] for name in names}
        | {"sample_id": "ab" * 16, "label": 3, "prediction": 8, "correct": False}
        | dict.fromkeys(PROBABILITIES.names)
        | changes
    )


MANY = [
    row(),
    row(draw=1, value=1.0),
    row(labels_per_class=None, value=0.0),
    row(metric="seconds", value=12.5),
]


@pytest.mark.parametrize(
    ("rows", "schema"),
    [(MANY, ROWS), ([prediction(), prediction(label=0, labels_per_class=None)], PREDICTIONS), ([], ROWS)],
)
def test_rows_read_back_as_they_were_written(tmp_path: Path, rows: list[Row], schema: pa.Schema) -> None:
    folder = tmp_path / "key=1"
    folder.mkdir()
    write_table(folder / "rows.parquet", rows, schema)
    assert pq.read_schema(folder / "rows.parquet").equals(schema)
    assert pq.read_table(folder / "rows.parquet").to_pylist() == rows
    assert digest_rows(pq.read_table(folder / "rows.parquet").to_pylist(), schema) == digest_rows(rows, schema)


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_table(tmp_path / name, [dict(reversed(r.items())) for r in MANY] if name == "b" else MANY, ROWS)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_digest_ignores_order_and_sees_every_value() -> None:
    digest = digest_rows(MANY, ROWS)
    assert digest == digest_rows(MANY[::-1], ROWS)
    changes: dict[str, object] = {name: 7 if isinstance(value, int) else f"{value}x" for name, value in row().items()}
    changes |= {"value": math.nextafter(0.1 + 0.2, 1), "settings": "{}"}
    others = [digest_rows([row(**{name: value}), *MANY[1:]], ROWS) for name, value in changes.items()]
    assert len({digest, *others, digest_rows([*MANY, MANY[0]], ROWS), digest_rows([], ROWS)}) == len(others) + 3
    assert digest_rows([], ROWS) != digest_rows([], PREDICTIONS)


@pytest.mark.parametrize("changes", [{"method": None}, {"draw": "first"}, {"num_images": 2**31}, {"value": "x"}])
def test_a_value_that_does_not_fit_its_column_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises((ValueError, pa.ArrowException)):
        write_table(tmp_path / "rows.parquet", [row(), row(**changes)], ROWS)


@pytest.mark.parametrize("value", [math.nan, math.inf, 87.3, -0.1])
def test_a_value_that_is_no_fraction_is_named(value: float) -> None:
    common = {name: row()[name] for name in ("task", "protocol", "method", "labels_per_class", "draw")}
    with pytest.raises(ValueError, match=f"mIoU of pixels is {value}; it must be a fraction"):
        measurement(common, MEAN_IOU, value, 3, "dev", {})


def test_a_digest_of_numbers_that_are_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        digest_rows([row(value=math.nan)], ROWS)


def test_a_look_at_test_becomes_its_accuracy_and_a_prediction_an_image(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels, guesses = rng.integers(0, 3, (2, 50))
    nulls = {name: [None] * 50 for name in PROBABILITIES.names}
    chosen = {"probability": rng.random(50, np.float32), "top5": rng.integers(0, 9, (50, 5)).tolist()}
    probabilities = pa.Table.from_pydict(nulls | chosen, PROBABILITIES)
    ids = [f"image {number}" for number in rng.permutation(50)]
    common = {name: row()[name] for name in ("protocol", "method", "labels_per_class", "draw")}
    [(found, predictions)] = scored(
        common, Truth("digits", ids, labels), guesses, "dev", {"rate": 0.1, "l2": 8.0}, probabilities
    )
    assert found == row(
        value=np.count_nonzero(labels == guesses) / 50,
        num_images=50,
        selected_on="dev",
        settings='{"l2": 8.0, "rate": 0.1}',
    )
    assert predictions.to_pylist() == [
        prediction(
            sample_id=ids[i],
            label=int(labels[i]),
            prediction=int(guesses[i]),
            correct=bool(labels[i] == guesses[i]),
            probability=float(chosen["probability"][i]),
            top5=chosen["top5"][i],
        )
        for i in range(50)
    ]
    write_table(tmp_path / "rows", [found], ROWS)
    assert pq.read_table(tmp_path / "rows").to_pylist() == [found]
    write_predictions(tmp_path / "predictions", [predictions, predictions])
    assert pq.read_table(tmp_path / "predictions").to_pylist() == 2 * predictions.to_pylist()
    write_predictions(tmp_path / "none", [])
    assert pq.read_table(tmp_path / "none").to_pylist() == []


def test_with_reals_labels_any_of_them_is_right_and_images_without_are_left_out() -> None:
    """Against timm's rule in plain Python: the mean of `prediction in labels` over the images that have labels."""
    rng = np.random.default_rng(1)
    labels, guesses = rng.integers(0, 4, (2, 40))
    real = [None if i == 7 else rng.permutation(4)[: i % 4].tolist() for i in range(40)]
    ids = [f"image {number}" for number in range(40)]
    common = {name: row()[name] for name in ("protocol", "method", "labels_per_class", "draw")}
    # as a filter may leave it: it does not begin at 0
    lists = pa.array([[9], *real], pa.list_(pa.int32()))[1:]
    (plain, images), (found, judged) = scored(common, Truth("ImageNet-1k", ids, labels, lists), guesses, "dev", {})
    assert [(plain, images)] == scored(common, Truth("ImageNet-1k", ids, labels), guesses, "dev", {})
    right = {ids[i]: bool(guesses[i] in known) for i, known in enumerate(real) if known}
    assert found == plain | {
        "task": "ImageNet-1k (ReaL)",
        "value": pytest.approx(np.mean(list(right.values()))),
        "num_images": len(right),
    }
    assert len(right) == 29 and {0 < found["value"] < 1, found["task"].endswith(REAL)} == {True}
    assert {line["sample_id"]: line["correct"] for line in judged.to_pylist()} == right
    places = [ids.index(name) for name in right]
    assert judged["label"].to_pylist() == labels[places].tolist()
    assert judged["prediction"].to_pylist() == guesses[places].tolist()


def test_what_was_seen_in_training_is_scored_apart_with_reals_labels_too() -> None:
    """Of four images the first two were seen; the first has no label of ReaL's, the last two have none either."""
    common = {name: row()[name] for name in ("protocol", "method", "labels_per_class", "draw")}
    real = pa.array([[], [1], [], []], pa.list_(pa.int32()))
    truth = Truth("x", list("abcd"), np.zeros(4, int), real, np.array([True, True, False, False]))
    found = scored(common, truth, np.array([0, 1, 1, 1]), "dev", {})
    seen, unseen = (f"{common['method']}, on test images {what} in training" for what in ("seen", "not seen"))
    said = [(line["task"], line["method"], line["value"], part["sample_id"].to_pylist()) for line, part in found]
    assert said == [
        ("x", seen, 0.5, ["a", "b"]),
        ("x", unseen, 0.0, ["c", "d"]),
        ("x (ReaL)", seen, 1.0, ["b"]),
    ]
    assert all(part["method"].to_pylist() == [line["method"]] * line["num_images"] for line, part in found)
    none = Truth("x", list("abcd"), np.zeros(4, int), real, np.zeros(4, bool))
    plain = Truth("x", list("abcd"), np.zeros(4, int), real)
    assert scored(common, none, np.zeros(4, int), "dev", {}) == scored(common, plain, np.zeros(4, int), "dev", {})


def test_ids_that_every_draw_repeats_are_written_once(tmp_path: Path) -> None:
    """50,000 ids of 32 letters in four draws, as in an evaluation of a large test split."""
    ids = [data.tobytes().hex() for data in np.random.default_rng(0).integers(256, size=(50_000, 16), dtype=np.uint8)]
    common = {name: row()[name] for name in ("protocol", "method", "labels_per_class", "draw")}
    labels = np.zeros(50_000, int)
    truth = Truth("digits", ids, labels)
    parts = [scored(common | {"draw": draw}, truth, labels, "dev", {})[0][1] for draw in range(4)]
    write_predictions(tmp_path / "predictions", parts)
    assert (tmp_path / "predictions").stat().st_size < 2 * 50_000 * 16
