"""More than 2 GiB of names in one column, as 27 million images with names of 80 bytes have."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import xxhash

from ray_jobs.data import writing
from ray_jobs.data.boxes import BOXES
from ray_jobs.data.columns import FACTS, large
from ray_jobs.data.shards import Images, Shard, open_dataset
from ray_jobs.data.writing import Description, write_dataset, write_rows
from ray_jobs.ingesting.copies import find_copies
from ray_jobs.ingesting.parts import Written, numbered

PARTS, ROWS, BYTES = 9, 30, 8_000_000  # the parts share the memory of their names


def facts(part: int, names: pa.Array) -> pa.Table:
    """Facts of empty images; the first image of every part has the same bytes."""
    zeros = pa.array([0] * ROWS)
    columns = {
        field.name: pa.nulls(ROWS, field.type) if field.name == "labels" else zeros.cast(field.type) for field in FACTS
    }
    ids = [f"{part}-{row:02d}" for row in range(ROWS)]
    texts = {"sample_id": ids, "content_id": ["same", *ids[1:]], "split": ["train"] * ROWS}
    checksum = pa.array([xxhash.xxh3_64_intdigest(b"")] * ROWS, pa.uint64())
    columns |= {name: pa.array(values) for name, values in texts.items()}
    return pa.table(columns | {"key": names, "checksum": checksum}, schema=FACTS)


def starts(names: pa.ChunkedArray) -> list[str]:
    return list(pc.utf8_slice_codeunits(names, 0, 2).to_pylist())


@pytest.mark.slow
def test_an_index_with_more_than_2_gib_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every image keeps its name while its index is put together, written and read."""
    monkeypatch.setattr(writing, "_ROW_GROUP", 100)  # a row group of such long names is below the limit
    names = pa.array([f"{row:02d}".ljust(BYTES, "x") for row in range(ROWS)])
    shards = [Shard(file=f"shards/{part}.parquet", rows=ROWS, bytes=1) for part in range(PARTS)]
    boxes = BOXES.empty_table()
    index = numbered(
        [Written(shard, (), facts(part, names), {}, Counter(), boxes, 0) for part, shard in enumerate(shards)]
    )
    assert pc.sum(pc.binary_length(index["key"])).as_py() > 2**31
    copies = find_copies("x", index, ["a"], ["train"] * len(index), {}, "drop", None)
    assert starts(copies["key"]) == ["00"] * (PARTS - 1)
    write_dataset(tmp_path, Description("x", ["a"], None), shards, index)
    del index, copies

    (tmp_path / "shards").mkdir()
    for shard in shards:
        (tmp_path / shard.file).touch()
    dataset = open_dataset(tmp_path)
    images = Images(dataset, dataset.index("train"))
    some = images.take(np.array([200, 7, 101])).rows
    expected = [sample_id[2:] for sample_id in some["sample_id"].to_pylist()]
    assert starts(some["key"]) == expected
    assert dataset.reader(images.rows).stored(7).key[:2] == expected[1]


@pytest.mark.parametrize("rows", [0, 10, 35])
def test_large_strings_in_memory_do_not_change_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(writing, "_ROW_GROUP", 10)
    schema = pa.schema([pa.field("key", pa.string(), nullable=False), pa.field("labels", pa.list_(pa.int32()))])
    labels = [[row] if row % 2 else None for row in range(rows)]
    table = pa.table([[str(row % 7) for row in range(rows)], labels], schema=schema)
    write_rows(tmp_path / "ours", table.cast(large(schema)), schema)
    pq.write_table(table, tmp_path / "theirs", row_group_size=10, compression="zstd")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
