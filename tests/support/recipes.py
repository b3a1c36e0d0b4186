"""Recipes to validate."""

from typing import Any

import yaml

from tests.support.paths import TINY


def changed(path: str, value: Any) -> dict[str, Any]:
    """The tiny recipe with one value replaced, or removed where `value` is ...."""
    raw = yaml.safe_load(TINY.read_text())
    *parents, last = path.split(".")
    at = raw
    for parent in parents:
        at = at[parent]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return raw
