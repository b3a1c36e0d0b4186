"""What runs, in which order, where: recipes, keys, the store, the plan, the driver. Imports neither torch nor ray.

For a notebook: `pipelines.open_store(uri)` gives models, datasets and tables; nothing else here is public.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.results.library import Library

__all__ = ["open_store"]


def open_store(uri: str) -> Library:
    """Open the results in a folder or at s3://bucket/prefix: `.model(KEY)`, `.dataset(KEY)`, `.table(NAME)`.

    Raises:
        StoreError: there is no store, or it cannot be read.
    """
    # here, so that `import pipelines` and every import below it stay fast
    from pipelines.results.library import Library
    from pipelines.store import open_store

    return Library(open_store(uri, create=False))
