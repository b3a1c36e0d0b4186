"""The client of S3."""

from typing import Any

import pytest
from botocore.utils import parse_timestamp

from pipelines.files import s3_client


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-27T12:24:28.123Z",
        "2026-11-27T12:24:28+02:00",
        "20261127T122428Z",
        "Fri, 27 Nov 2026 12:24:28 GMT",
        "1795782268",
        1795782268.5,
    ],
)
def test_times_are_those_that_botocore_reads(text: Any) -> None:
    assert s3_client._timestamp(text) == parse_timestamp(text)
