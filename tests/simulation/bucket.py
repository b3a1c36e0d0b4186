"""A bucket below the real S3Store: a client with the methods of boto3's that the store uses for records.

Like botocore's, it tries a request again that got lost or was answered by 500 or 503, and not one that was answered by
409 or 412. tests/simulation/test_bucket.py compares its answers with moto's. A LIST is one page.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

from botocore.exceptions import ClientError, IncompleteReadError, ReadTimeoutError

from pipelines.environment import environment
from pipelines.files.s3_client import TRIES
from tests.simulation.faults import FaultyNetwork

LOST_SECONDS = 2.0  # until a request that got lost is given up


def _error(status: int, code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Request")  # type: ignore[typeddict-item]


def _lost(request: str) -> Exception:
    return ReadTimeoutError(endpoint_url=request)


class _Cut(io.BytesIO):
    """The body of an answer whose connection breaks."""

    def read(self, size: int | None = -1) -> bytes:
        raise IncompleteReadError(actual_bytes=0, expected_bytes=len(self.getvalue()))


class BucketClient:
    """A process's client of the bucket with these objects."""

    def __init__(self, objects: dict[str, bytes], network: FaultyNetwork) -> None:
        self.objects, self.network = objects, network

    def _ask(self, what: str, name: str, answer: Callable[[], Any]) -> Any:
        network = self.network
        for tried in range(TRIES):
            try:
                if network.strikes(network.weather.losses, f"503 to {what} {name}"):
                    raise _error(503, "SlowDown")
                answered = network.ask(what, name, answer, _lost)
                if network.strikes(network.weather.losses, f"500 after {what} {name}"):
                    raise _error(500, "InternalError")
                return answered
            except (ReadTimeoutError, ClientError) as error:
                if tried + 1 == TRIES:
                    raise
                if isinstance(error, ReadTimeoutError):
                    environment().sleep(LOST_SECONDS)
            environment().sleep(network.chance() * 2**tried)
        raise AssertionError

    def put_object(self, Bucket: str, Key: str, Body: bytes, IfNoneMatch: str = "") -> None:  # noqa: N803
        if not IfNoneMatch:
            self._ask("replace", Key, lambda: self.objects.update({Key: Body}))
            return

        def put() -> bool:
            is_new = Key not in self.objects
            self.objects.setdefault(Key, Body)
            return is_new

        if self.network.strikes(self.network.weather.losses, f"409 to create {Key}"):
            raise _error(409, "ConditionalRequestConflict")
        if not self._ask("create", Key, put):
            raise _error(412, "PreconditionFailed")

    def get_object(self, Bucket: str, Key: str) -> dict[str, Any]:  # noqa: N803
        data = self._ask("read", Key, lambda: self.objects.get(Key))
        if data is None:
            raise _error(404, "NoSuchKey")
        is_cut = self.network.strikes(self.network.weather.losses, f"cut read {Key}")
        return {"ContentLength": len(data), "Body": _Cut(data) if is_cut else io.BytesIO(data)}

    def delete_object(self, Bucket: str, Key: str) -> None:  # noqa: N803
        self._ask("remove", Key, lambda: self.objects.pop(Key, None))

    def get_paginator(self, name: str) -> BucketClient:
        assert name == "list_objects_v2"
        return self

    def paginate(
        self,
        Bucket: str,  # noqa: N803
        Prefix: str,  # noqa: N803
        Delimiter: str = "",  # noqa: N803
        StartAfter: str = "",  # noqa: N803
    ) -> Iterator[dict[str, Any]]:
        def page() -> dict[str, Any]:
            found = sorted(key for key in self.objects if key.startswith(Prefix) and key > StartAfter)
            rests = {key: key[len(Prefix) :].partition(Delimiter) if Delimiter else (key, "", "") for key in found}
            folders = sorted({Prefix + first + slash for first, slash, _ in rests.values() if slash})
            files = [{"Key": key, "Size": len(self.objects[key])} for key in found if not rests[key][1]]
            return {"Contents": files, "CommonPrefixes": [{"Prefix": folder} for folder in folders]}

        yield self._ask("list", Prefix.rstrip("/"), page)
