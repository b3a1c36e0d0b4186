"""Prepared data sets for tests: Parquet of Hugging Face, by pyarrow with the metadata by hand; folders of TFDS."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordWriter

from tests.support.archives import image
from tests.support.tfrecords import example, framed

NAMES = ["cat", "dog", "fox"]
HF_FEATURES = {"image": {"_type": "Image"}, "label": {"names": NAMES, "_type": "ClassLabel"}}


def put_parquet(
    path: Path,
    images: Sequence[bytes | None],
    labels: Sequence[object],
    *,
    features: Mapping[str, object] | None = HF_FEATURES,
    column: str = "image",
    reverse: bool = False,
    rows: int = 4,
    compression: str = "snappy",
    plain: bool = True,
) -> None:
    """plain: without dictionaries, with checksums of pages."""
    fields = [pa.field("bytes", pa.binary()), pa.field("path", pa.string())]
    struct = pa.struct(fields[::-1] if reverse else fields)
    cells = [{"bytes": data, "path": f"{number}.jpg"} for number, data in enumerate(images)]
    table = pa.table({column: pa.array(cells, struct), "label": pa.array(labels)})
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        table,
        path,
        row_group_size=rows,
        compression=compression,
        use_dictionary=not plain,
        write_page_checksum=plain,
    )


FORMATS = ("tfrecord", "array_record")
PREFIX = "tensorflow_datasets.core.features"
FEATURES = {
    "pythonClassName": f"{PREFIX}.features_dict.FeaturesDict",
    "featuresDict": {
        "features": {
            "id": {"pythonClassName": f"{PREFIX}.text_feature.Text", "text": {}},
            "image": {
                "pythonClassName": f"{PREFIX}.image_feature.Image",
                "image": {
                    "shape": {"dimensions": ["-1", "-1", "3"]},
                    "dtype": "uint8",
                    "encodingFormat": "jpeg",
                },
            },
            "label": {
                "pythonClassName": f"{PREFIX}.class_label_feature.ClassLabel",
                "classLabel": {"numClasses": "3"},
            },
        }
    },
}
OLDER = {
    "type": f"{PREFIX}.features_dict.FeaturesDict",
    "content": {
        "image": {"type": f"{PREFIX}.image_feature.Image", "content": {"shape": [None, None, 3]}},
        "label": {"type": f"{PREFIX}.class_label_feature.ClassLabel", "content": {"num_classes": 3}},
    },
}
SPLITS = {"train": [5, 4], "validation": [2], "test": [3]}


def records(split: str) -> list[bytes]:
    seeds = range(100 * list(SPLITS).index(split), 100 * list(SPLITS).index(split) + sum(SPLITS[split]))
    return [example({"id": [f"{seed}".encode()], "image": [image(seed)], "label": [seed % 3]}) for seed in seeds]


def put_tfds(root: Path, form: str, splits: Mapping[str, Sequence[int]] = SPLITS, **info: object) -> None:
    described = []
    for split, lengths in splits.items():
        left = iter(records(split))
        for shard, length in enumerate(lengths):
            path = root / f"toy-{split}.{form}-{shard:05d}-of-{len(lengths):05d}"
            own = [next(left) for _ in range(length)]
            if form == "tfrecord":
                path.write_bytes(framed(own))
                continue
            writer = ArrayRecordWriter(str(path), "group_size:1")
            for record in own:
                writer.write(record)
            writer.close()
        described.append(
            {
                "name": split,
                "shardLengths": [str(length) for length in lengths],
                "numBytes": "1000",
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
            }
        )
    about = {"name": "toy", "version": "1.0.0", "splits": described}
    if form != "tfrecord":
        about["fileFormat"] = form
    (root / "dataset_info.json").write_text(json.dumps(about | info))
    (root / "features.json").write_text(json.dumps(FEATURES))
    (root / "label.labels.txt").write_text("cat\ndog\nfox\n")
