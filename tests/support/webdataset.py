"""Shards of a WebDataset."""

import json

from tests.support.archives import image


def shard(labels: list[int], start: int = 0, form: str = "jpg") -> dict[str, bytes]:
    """As webdataset's ShardWriter orders it: the fields of a sample one after the other."""
    members = {}
    for i, label in enumerate(labels, start):
        said = json.dumps({"label": label, "class_name": f"c{label}", "width": 24})
        members |= {
            f"{i:06d}.cls": str(label).encode(),
            f"{i:06d}.{form}": image(i),
            f"{i:06d}.json": said.encode(),
        }
    return members
