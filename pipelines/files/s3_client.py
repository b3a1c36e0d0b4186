"""The client of S3, and the translation of its errors.

boto3 finds the server and the credentials: AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_PROFILE, keys from the environment,
~/.aws or the machine's role. None of these is written into a record.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from typing import Any

import boto3
import botocore.session
from boto3.exceptions import RetriesExceededError
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 (as boto3 names it)
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.utils import parse_timestamp
from s3transfer.exceptions import S3DownloadFailedError

from pipelines.errors import StoreDamaged, StoreError, StoreUnreachable

CONNECT_SECONDS, READ_SECONDS = 2.0, 20.0  # timeouts, before the next try
TRIES = 4  # botocore waits up to 1, 2, 4 s between them, with jitter
PART_BYTES = 16 * 2**20  # larger files are transferred in parts of this size, several at once
THREADS = 8
# S3DownloadFailedError: the object was replaced during the download.
_TRANSFER = (RetriesExceededError, S3DownloadFailedError)
_DAMAGED = {"NoSuchKey", "InvalidRange"}
_RETRIED = {409, 429, 500, 502, 503, 504}
_EXPLAINED = {
    "NoSuchBucket": "there is no such bucket; create it, or correct the name",
    "NoSuchKey": "the object is missing, though its manifest names it: the store is damaged",
    "InvalidRange": "the object is shorter than its manifest says: it is damaged",
    "AccessDenied": "access is denied: a store needs s3:GetObject, PutObject, DeleteObject and ListBucket",
    "InvalidAccessKeyId": "the server does not know this access key",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "ExpiredToken": "the credentials have expired",
    # With the host's name, because the message may be from a job on another machine.
    "RequestTimeTooSkewed": f"the clock of {socket.gethostname()} differs too much from the server's; correct it",
}


@cache
def client() -> Any:
    """Return the process's S3 client, which several threads may use. Raises StoreError."""
    if "@" in _endpoint():
        raise StoreError("AWS_ENDPOINT_URL_S3 contains a user or a password; put credentials into ~/.aws/credentials")
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": TRIES},
        max_pool_connections=2 * THREADS,
        # Servers other than AWS's reject or corrupt uploads with trailing checksums. Without them, the signature
        # protects uploads, and downloads are compared with their manifests.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = botocore.session.get_session()
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_timestamp)
    try:
        return boto3.session.Session(botocore_session=session).client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise StoreError(f"cannot use S3: {error}") from None


def _timestamp(value: Any) -> datetime:
    """Parse a time, in ISO 8601 without botocore's parser, which takes 60% of the CPU time of a LIST."""
    if isinstance(value, str) and value[10:11] == "T":
        with suppress(ValueError):
            return datetime.fromisoformat(value)
    parsed: datetime = parse_timestamp(value)
    return parsed


def transfer() -> TransferConfig:
    return TransferConfig(
        multipart_threshold=PART_BYTES + 1,
        multipart_chunksize=PART_BYTES,
        max_concurrency=THREADS,
        preferred_transfer_client="classic",  # the other ignores the client's settings
    )


@contextmanager
def translate_errors(uri: str, operation: str) -> Iterator[None]:
    """Turn boto3's errors into a StoreError that names the address and the operation, and says what to do."""
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise StoreError(
            f"{uri}: cannot {operation}: {str(error).rstrip('.').lower()}; put them into ~/.aws/credentials or the "
            f"environment, also on the cluster's nodes if this message is from a job{_at_endpoint()}"
        ) from None
    except ClientError as error:
        code = error_code(error)
        # NoSuchUpload: most likely the answer to the end of a multipart upload was lost, so its outcome is unknown
        retry = error_status(error) in _RETRIED or code in {"SlowDown", "RequestTimeout", "NoSuchUpload"}
        reason = _EXPLAINED.get(code) or f"{code} {error.response['Error'].get('Message', '')}".strip()
        kind = StoreUnreachable if retry else StoreDamaged if code in _DAMAGED else StoreError
        raise kind(f"{uri}: cannot {operation}: {reason}{_at_endpoint()}") from None
    except (HTTPClientError, ConnectionError, IncompleteReadError, *_TRANSFER) as error:
        raise StoreUnreachable(f"{uri}: cannot {operation}: {_last_line(error)}{_at_endpoint()}") from None
    except BotoCoreError as error:
        raise StoreError(f"{uri}: cannot {operation}: {_last_line(error)}{_at_endpoint()}") from None


def error_code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def error_status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def _at_endpoint() -> str:
    return f" (at {_endpoint()})" if _endpoint() else ""


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][:300] if str(error).strip() else type(error).__name__
