"""The simulator's bucket answers as moto does."""

from random import Random
from typing import Any

from botocore.exceptions import ClientError

from tests.simulation.bucket import BucketClient
from tests.simulation.faults import FaultyNetwork, Weather
from tests.simulation.loop import Loop, Process
from tests.support.s3 import Server


def answers(client: Any, bucket: str) -> list[Any]:
    """What a client is answered to the requests that the store makes."""

    def ask(method: str, **parameters: Any) -> Any:
        try:
            answered = getattr(client, method)(Bucket=bucket, **parameters)
        except ClientError as error:
            return error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]
        return (answered["ContentLength"], answered["Body"].read()) if method == "get_object" else "done"

    def pages(**parameters: Any) -> Any:
        found = [*client.get_paginator("list_objects_v2").paginate(Bucket=bucket, **parameters)]
        files = [(each["Key"], each["Size"]) for page in found for each in page.get("Contents", ())]
        return files, [each["Prefix"] for page in found for each in page.get("CommonPrefixes", ())]

    return [
        ask("get_object", Key="a/absent"),
        ask("put_object", Key="a/1", Body=b"one", IfNoneMatch="*"),
        ask("put_object", Key="a/1", Body=b"two", IfNoneMatch="*"),
        ask("get_object", Key="a/1"),
        ask("put_object", Key="a/1", Body=b"three"),
        ask("get_object", Key="a/1"),
        *[ask("put_object", Key=key, Body=b"x") for key in ("a/b/2", "a/b/3", "a/c", "ab", "b")],
        pages(Prefix="a/", Delimiter="/"),
        pages(Prefix="a/b", Delimiter="/"),
        pages(Prefix="a/", Delimiter="/", StartAfter="a/b"),
        pages(Prefix="a/", Delimiter="/", StartAfter="a/c"),
        pages(Prefix="a"),
        ask("delete_object", Key="a/c"),
        ask("delete_object", Key="a/c"),
        pages(Prefix=""),
    ]


def test_its_answers_are_those_of_moto(moto: Server) -> None:
    bucket = moto.bucket()
    network = FaultyNetwork(Process(Loop()), Random(0), Weather(until=0.0))
    assert answers(BucketClient({}, network), "any") == answers(bucket.client, bucket.name)
