"""Open a store by its address."""

from __future__ import annotations

from pipelines.errors import StoreError
from pipelines.store.folder import FolderStore, store_folder
from pipelines.store.protocol import Store


def open_store(uri: str, *, create: bool = True) -> Store:
    """Open the store in a folder or at s3://bucket/prefix.

    Raises:
        StoreAbsent: there is no store, and `create` is false.
        StoreError: it cannot be used.
    """
    if uri.startswith("s3://"):
        from pipelines.store.s3 import S3Store  # boto3 takes longer than planning in a folder

        return S3Store(uri, create=create)
    if "://" in uri:
        scheme = uri.partition("://")[0]
        raise StoreError(f"{scheme}://...: unsupported store; expected a folder or s3://bucket/prefix")
    return FolderStore(store_folder(uri), create=create)
