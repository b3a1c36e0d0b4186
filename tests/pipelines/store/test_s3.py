"""S3 as it is on bad days: lost answers, conflicts, errors, silence, damage; and no secret anywhere."""

import hashlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from s3transfer.exceptions import S3DownloadFailedError

from pipelines.files import s3_client
from pipelines.files.hashing import cache_folder
from pipelines.files.s3 import parse
from pipelines.store import FileEntry, StoreError, StoreUnreachable, all_manifests, commit, open_store
from pipelines.store import s3 as s3_store
from pipelines.store.s3 import S3Store
from tests.support.records import flip, make_context, make_manifest
from tests.support.s3 import Bucket, Fault, Proxy, Server, faulty, used

pytestmark = pytest.mark.slow  # most of them wait for what fails
SECRET = "wJalrXUtnFEMI"
PART_BYTES = 5 * 2**20  # the least that S3 takes
BUSY = 8.0  # what a busy machine may add to known waits


@pytest.fixture(scope="module")
def behind(moto: Server) -> Iterator[tuple[Proxy, Server]]:
    """moto behind a proxy that fails when it is told to."""
    with faulty(moto) as pair:
        yield pair


@pytest.fixture
def proxy(behind: tuple[Proxy, Server], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy, server = behind
    proxy.faults.clear()
    monkeypatch.setattr(s3_client, "PART_BYTES", PART_BYTES)
    with used(server, monkeypatch):
        yield proxy
    assert not [fault for fault in proxy.faults if 0 < fault.times < 100], "what was to fail was not asked for"


@pytest.fixture
def bucket(moto: Server) -> Bucket:
    return moto.bucket()


@pytest.fixture
def store(proxy: Proxy, bucket: Bucket) -> S3Store:
    store = S3Store(f"s3://{bucket.name}/some/prefix")
    proxy.seen.clear()
    return store


def stage(store: S3Store, **files: bytes) -> tuple[FileEntry, ...]:
    with store.staging("f") as staging:
        for name, data in files.items():
            (staging.path / name).write_bytes(data)
    return staging.files


def cached(store: S3Store) -> list[str]:
    root = cache_folder() / "objects" / store.id
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


# ------------------------------------------------------------------------------------------------- create-only


def test_our_own_write_whose_answer_was_lost_is_known_by_its_bytes(store: S3Store, proxy: Proxy) -> None:
    proxy.faults.append(Fault("PUT", "/a", lost=True))
    assert store.create("a", b"nonce 1")
    assert proxy.asked("PUT", "/a") == [200, 412], "it was written, the answer was lost, it was there already"


def test_anothers_write_is_not_ours_even_if_an_answer_was_lost(store: S3Store, proxy: Proxy, bucket: Bucket) -> None:
    bucket.write("some/prefix/a", b"nonce 2")
    proxy.faults.append(Fault("PUT", "/a", lost=True))
    assert not store.create("a", b"nonce 1")
    assert proxy.asked("PUT", "/a") == [412, 412]
    assert bucket.read("some/prefix/a") == b"nonce 2"


def test_a_conflict_is_asked_again(store: S3Store, proxy: Proxy) -> None:
    proxy.faults.append(Fault("PUT", "/a", 409, "ConditionalRequestConflict", times=3))
    assert store.create("a", b"1")
    assert proxy.asked("PUT", "/a") == [409, 409, 409, 200]


def test_a_conflict_that_does_not_end_is_told(store: S3Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_store, "CONFLICT_SECONDS", 0.5)
    proxy.faults.append(Fault("PUT", "/a", 409, "ConditionalRequestConflict", times=1000))
    with pytest.raises(StoreUnreachable, match="ConditionalRequestConflict"):
        store.create("a", b"1")


def test_a_server_that_overwrites_is_refused(
    behind: tuple[Proxy, Server], proxy: Proxy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "drop", "if-none-match")
    with pytest.raises(StoreError, match="overwrites"):
        S3Store(f"s3://{bucket.name}/x")


def test_objects_are_removed_one_after_the_other(store: S3Store, proxy: Proxy, bucket: Bucket) -> None:
    for name in ("b", "a", "c"):
        store.create(name, b"1")
    proxy.faults.append(Fault("DELETE", "/a", 403, "AccessDenied"))
    with pytest.raises(StoreError, match=r"cannot remove a: access is denied.*DeleteObject"):
        store.remove(["b", "a", "c"])
    assert set(bucket.objects("some/prefix/")) == {"some/prefix/a", "some/prefix/c", "some/prefix/store.json"}


# ------------------------------------------------------------------------------------------------- errors that pass


@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "SlowDown")])
def test_an_error_that_passes_is_not_noticed(store: S3Store, proxy: Proxy, status: int, code: str) -> None:
    proxy.faults.append(Fault("PUT", "/a", status, code))
    proxy.faults.append(Fault("GET", "/a", status, code))
    proxy.faults.append(Fault("GET", "prefix=", status, code))
    assert store.create("a", b"1")
    assert store.read("a") == b"1"
    assert store.names("") == ["a", "store.json"]
    assert proxy.asked("PUT", "/a") == [status, 200]


@pytest.mark.parametrize("tries", [2, s3_client.TRIES])
def test_an_error_that_stays_is_told_in_time(
    behind: tuple[Proxy, Server], store: S3Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    monkeypatch.setattr(s3_client, "TRIES", tries)
    with used(behind[1], monkeypatch, AWS_MAX_ATTEMPTS="9"):
        proxy.faults.append(Fault("GET", "/a", 503, "SlowDown", times=1000))
        began = time.monotonic()
        with pytest.raises(StoreUnreachable, match=r"s3://.*cannot read a: .*at http://127"):
            store.read("a")
        assert time.monotonic() - began < 2 ** (tries - 1) - 1 + BUSY, "botocore's waits"
    assert proxy.asked("GET", "/a") == [503] * tries


def test_an_answer_that_breaks_off_is_asked_for_again(store: S3Store, proxy: Proxy) -> None:
    data = os.urandom(100_000)
    files = stage(store, x=data)
    proxy.faults.append(Fault("GET", "/x", half=True, times=2))
    assert store.read("f/x") == data
    proxy.faults.append(Fault("GET", "/x", half=True, times=2))
    assert (store.local("f", files) / "x").read_bytes() == data
    proxy.faults.append(Fault("GET", "/x", half=True, times=2))
    assert store.read_range("f/x", 1000, 50_000) == data[1000:51_000]
    proxy.faults.append(Fault("GET", "/x", half=True, times=1000))
    with pytest.raises(StoreUnreachable, match="cannot read f/x"):
        store.read("f/x")


def test_a_server_that_falls_silent_is_unreachable_in_time(
    behind: tuple[Proxy, Server], proxy: Proxy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_client, "READ_SECONDS", 0.2)
    monkeypatch.setattr(s3_client, "TRIES", 2)
    with used(behind[1], monkeypatch, AWS_MAX_ATTEMPTS="9"):
        proxy.faults.append(Fault("GET", "/some", mute=True, times=1000))
        began = time.monotonic()
        with pytest.raises(StoreUnreachable, match=r"[Tt]imeout|timed out"):
            S3Store(f"s3://{bucket.name}/some")
        assert time.monotonic() - began < 2 * 0.2 + 1 + BUSY


def test_where_nothing_listens_it_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, "TRIES", 2)
    with used(Server("http://127.0.0.1:1", "a", SECRET), monkeypatch):
        began = time.monotonic()
        with pytest.raises(StoreUnreachable, match=r"s3://some-bucket: cannot read store\.json"):
            open_store("s3://some-bucket")
        assert time.monotonic() - began < 1 + BUSY


# ------------------------------------------------------------------------------------------------- errors that stay


def test_a_bucket_that_does_not_exist_is_one_clear_message(proxy: Proxy) -> None:
    with pytest.raises(StoreError, match=r"s3://no-such-bucket: cannot read .*there is no such bucket") as told:
        open_store("s3://no-such-bucket")
    assert not isinstance(told.value, StoreUnreachable)


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("AccessDenied", 403, "access is denied"),
        ("InvalidAccessKeyId", 403, "does not know this access key"),
        ("SignatureDoesNotMatch", 403, "secret key"),
        ("ExpiredToken", 400, "expired"),
        ("RequestTimeTooSkewed", 403, f"the clock of {socket.gethostname()} differs"),
        ("NotImplemented", 501, "NotImplemented"),
    ],
)
def test_what_the_server_refuses_is_one_clear_message(
    store: S3Store, proxy: Proxy, code: str, status: int, said: str
) -> None:
    proxy.faults += [Fault(method, "", status, code, times=1000) for method in ("GET", "PUT")]

    def put_file() -> None:
        stage(store, x=b"1")

    def get_file() -> None:
        store.local("f", [FileEntry(path="x", size=1, sha256="0" * 64)])

    for does in (
        lambda: store.create("a", b""),
        lambda: store.read("a"),
        lambda: store.names(""),
        put_file,
        get_file,
    ):
        with pytest.raises(StoreError, match=said) as told:
            does()
        assert not isinstance(told.value, StoreUnreachable), "asking again does not help"
        assert str(told.value).count("\n") == 0


def test_a_read_only_bucket_can_be_read(store: S3Store, proxy: Proxy, bucket: Bucket) -> None:
    files = stage(store, x=b"1")
    proxy.faults.append(Fault("PUT", "", 403, "AccessDenied", times=1000))
    opened = open_store(store.uri)
    assert opened.names("f") == ["x"]
    assert (opened.local("f", files) / "x").read_bytes() == b"1"
    with pytest.raises(StoreError, match=r"cannot write store.json: access is denied"):
        open_store(f"s3://{bucket.name}/other")


def test_without_credentials_it_is_said_where_to_put_them(
    behind: tuple[Proxy, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    none = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    with (
        used(behind[1], monkeypatch, **none),
        pytest.raises(StoreError, match=r"unable to locate credentials.*~/\.aws/credentials"),
    ):
        open_store("s3://some-bucket")


def test_a_profile_that_is_not_there_is_one_clear_message(
    behind: tuple[Proxy, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        used(behind[1], monkeypatch, AWS_PROFILE="nobody"),
        pytest.raises(StoreError, match=r"profile \(nobody\)"),
    ):
        open_store("s3://some-bucket")


@pytest.mark.parametrize(
    "uri",
    [
        f"s3://KEY:{SECRET}@bucket/prefix",
        f"s3://KEY:{SECRET}/with/slashes@bucket/prefix",
        f"s3://KEY:{SECRET}/bucket",
        f"s3://bucket/prefix?secret_key={SECRET}",
        f"s3://bucket/prefix#{SECRET}",
        f"S3://KEY:{SECRET}@bucket/prefix",
        f"https://KEY:{SECRET}@host/bucket",
    ],
)
def test_keys_in_an_address_are_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(StoreError, match="s3://bucket/prefix") as told:
        open_store(uri)
    assert SECRET not in str(told.value)


def test_keys_in_an_endpoint_are_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        used(Server(f"http://KEY:{SECRET}@127.0.0.1:1", "a", "b"), monkeypatch),
        pytest.raises(StoreError, match="AWS_ENDPOINT_URL_S3") as told,
    ):
        open_store("s3://some-bucket")
    assert SECRET not in str(told.value)


@pytest.mark.parametrize("uri", ["s3://", "s3:///x", "s3://B", "s3://bucket//x", "s3://bucket/a/../b", "s3://a b/c"])
def test_an_address_that_is_none_is_one_clear_message(uri: str) -> None:
    with pytest.raises(StoreError, match="s3://"):
        open_store(uri)


def test_addresses() -> None:
    assert parse("s3://bucket") == parse("s3://bucket/") == ("bucket", "")
    assert parse("s3://my.bucket-1/a/b/") == ("my.bucket-1", "/a/b")


# ------------------------------------------------------------------------------------------------- files


def test_large_files_go_and_come_in_parts(store: S3Store, proxy: Proxy) -> None:
    large, exact = os.urandom(2 * PART_BYTES + 12_345), os.urandom(PART_BYTES)
    files = stage(store, large=large, exact=exact)
    assert len(proxy.asked("PUT", "partNumber=")) == 3
    assert len(proxy.asked("POST", "/large?uploads")) == 1
    assert len(proxy.asked("PUT", "/exact")) == 1
    local = store.local("f", files)
    assert (local / "large").read_bytes() == large
    assert (local / "exact").read_bytes() == exact
    ranges = {headers.get("Range") for method, path, *_, headers in proxy.seen if method == "GET" and "/large" in path}
    assert len(ranges) == 3
    assert [
        headers.get("Range") for method, path, *_, headers in proxy.seen if method == "GET" and "/exact" in path
    ] == [None]


def test_an_upload_in_parts_goes_on_after_errors(store: S3Store, proxy: Proxy, bucket: Bucket) -> None:
    data = os.urandom(PART_BYTES + 1)
    proxy.faults.append(Fault("PUT", "partNumber=1", 500))
    proxy.faults.append(Fault("PUT", "partNumber=2", 503, "SlowDown"))
    (entry,) = stage(store, x=data)
    assert hashlib.sha256(bucket.read("some/prefix/f/x")).hexdigest() == entry.sha256


def test_an_upload_that_fails_leaves_nothing_and_keeps_its_reason(store: S3Store, proxy: Proxy, bucket: Bucket) -> None:
    proxy.faults.append(Fault("PUT", "partNumber=2", 403, "AccessDenied", times=1000))
    with pytest.raises(StoreError, match=r"cannot write f/x: access is denied") as told:
        stage(store, x=os.urandom(PART_BYTES + 1))
    assert not isinstance(told.value, StoreUnreachable)
    assert list(bucket.objects()) == ["some/prefix/store.json"]
    assert not bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads")


@pytest.mark.slow
def test_a_file_that_is_replaced_while_it_is_fetched_is_told() -> None:
    """s3transfer says so; moto does not know If-Match."""
    told = pytest.raises(StoreUnreachable, match=r"s3://b/w\.npz: cannot read it: it was modified")
    with told, s3_client.translate_errors("s3://b/w.npz", "read it"):
        raise S3DownloadFailedError("it was modified")


def test_listings_are_paged(store: S3Store, proxy: Proxy, bucket: Bucket) -> None:
    names = [f"{number:04}" for number in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: bucket.write(f"some/prefix/many/{name}/x", b""), names))
    assert store.names("many") == names
    assert len(proxy.asked("GET", "prefix=")) == 2
    assert store.names("many", "1", after="1001") == names[-3:]
    assert len(proxy.asked("GET", "prefix=")) == 3


def test_where_a_delimiter_is_refused_versions_are_unknown_and_everything_is_read(store: S3Store, proxy: Proxy) -> None:
    """MinIO, Storj and others list by "/" only."""
    committed = [commit(store, make_manifest("ingest", key=key)) for key in ("a", "b")]
    assert list(all_manifests(store, "ingest")) == committed
    proxy.faults.append(Fault("GET", "delimiter=%2Fattempts%2F", 501, "NotImplemented", times=2))
    assert store.versions("artifacts/ingest", ["manifest.json"], "attempts") == {"a": "", "b": ""}
    assert list(all_manifests(store, "ingest")) == committed


def test_a_file_that_is_here_is_not_fetched_again(store: S3Store, proxy: Proxy) -> None:
    files = stage(store, x=b"one", y=b"two")
    store.local("f", files[:1])
    assert cached(store) == ["f/x"]
    store.local("f", files)
    store.local("f", files)
    assert len(proxy.asked("GET", "/f/x")) == len(proxy.asked("GET", "/f/y")) == 1


def test_a_file_of_the_cache_that_has_changed_is_fetched_again(store: S3Store, proxy: Proxy) -> None:
    files = stage(store, x=b"12345")
    path = store.local("f", files) / "x"
    flip(path)
    assert store.local("f", files) / "x" == path
    assert path.read_bytes() == b"12345"
    assert len(proxy.asked("GET", "/f/x")) == 2


@pytest.mark.parametrize("size", [10, PART_BYTES + 10])
@pytest.mark.parametrize("damage", ["changed", "shorter", "longer", "gone"])
def test_damage_behind_a_manifest_is_told_and_not_kept(store: S3Store, bucket: Bucket, damage: str, size: int) -> None:
    data = os.urandom(size)
    files = stage(store, x=data)
    name = "some/prefix/f/x"
    if damage == "gone":
        bucket.client.delete_object(Bucket=bucket.name, Key=name)
    else:
        changed = {
            "changed": data[:-1] + bytes([data[-1] ^ 1]),
            "shorter": data[: size // 2],
            "longer": data + b"x",
        }
        bucket.write(name, changed[damage])
    with pytest.raises(StoreError, match="damaged"):
        store.local("f", files)
    assert cached(store) == []


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", "x\0"])
def test_a_manifest_that_names_files_elsewhere_is_refused(store: S3Store, path: str) -> None:
    with pytest.raises(StoreError, match="outside its artifact"):
        store.local("f", [FileEntry(path=path, size=1, sha256="0" * 64)])


def test_a_manifest_whose_key_names_a_folder_elsewhere_is_refused(store: S3Store) -> None:
    with pytest.raises(StoreError, match="outside its artifact"):
        store.local(make_manifest(key="../../../../x").folder, [])


def test_a_store_whose_id_names_a_folder_elsewhere_is_refused(proxy: Proxy, bucket: Bucket) -> None:
    bucket.write("store.json", b'{"id": "../../..", "layout": 1}')
    with pytest.raises(StoreError, match="outside its artifact"):
        open_store(f"s3://{bucket.name}").local("f", [])


FETCH = """
import sys
from pipelines.store import FileEntry, open_store
uri, path, size, sha256 = sys.argv[1:]
folder = open_store(uri).local("f", [FileEntry(path=path, size=int(size), sha256=sha256)])
assert (folder / path).stat().st_size == int(size)
"""


@pytest.mark.slow
def test_two_processes_fetch_the_same_file_at_once_and_none_sees_half(store: S3Store) -> None:
    (entry,) = stage(store, x=os.urandom(20 * 2**20))
    sizes, end = set(), threading.Event()
    path = cache_folder() / "objects" / store.id / "f" / "x"

    def look() -> None:
        while not end.is_set():
            if path.exists():
                sizes.add(path.stat().st_size)
            time.sleep(0.001)

    watcher = threading.Thread(target=look)
    watcher.start()
    command = [sys.executable, "-c", FETCH, store.uri, entry.path, str(entry.size), entry.sha256]
    processes = [subprocess.Popen(command) for _ in range(2)]
    codes = [process.wait(60) for process in processes]
    end.set()
    watcher.join()
    assert codes == [0, 0]
    assert sizes == {entry.size}
    assert hashlib.sha256(path.read_bytes()).hexdigest() == entry.sha256
    assert cached(store) == ["f/x"], "no temporary file is left"


# ------------------------------------------------------------------------------------------------- secrets


def test_what_travels_to_tasks_carries_no_key(store: S3Store, moto: Server) -> None:
    import cloudpickle

    from pipelines.spec import Ingest

    store.create("a", b"1")  # the client has signed by now
    context = make_context(store, Ingest(job="ingest", source={"kind": "digits"}))  # type: ignore[arg-type]
    assert context.open_store().read("a") == b"1"
    for travels in (context, store, SimpleNamespace(store=store)):
        data = cloudpickle.dumps(travels)
        assert moto.secret_key.encode() not in data
        assert moto.access_key.encode() not in data
    assert moto.secret_key not in str(store.settings)
    assert store.settings["AWS_ENDPOINT_URL_S3"].startswith("http://127.0.0.1:")


def test_keys_from_the_home_folder_and_an_endpoint_from_a_jobs_settings(
    store: S3Store, moto: Server, tmp_path: Path
) -> None:
    """As a node of a cluster has it: nothing of AWS in the environment but what the store passes on."""
    store.create("a", b"1")
    (tmp_path / ".aws").mkdir()
    keys = f"aws_access_key_id={moto.access_key}\naws_secret_access_key={moto.secret_key}\n"
    (tmp_path / ".aws" / "credentials").write_text(f"[default]\n{keys}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    said = subprocess.run(
        [sys.executable, "-c", f"from pipelines.store import *; print(open_store('{store.uri}').read('a'))"],
        env=environment | store.settings | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.stdout == "b'1'\n", said.stderr


def start_stage(endpoint: str, home: Path, keys: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a stage's process whose store is at this endpoint."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    given = {"AWS_ENDPOINT_URL_S3": endpoint, "AWS_EC2_METADATA_DISABLED": "true", "HOME": str(home), **keys}
    spec = "s3://some-bucket/artifacts/ingest/k/attempts/1/attempt.json"
    command = [sys.executable, "-m", "ray_jobs.ingest", "--spec", spec]
    return subprocess.Popen(command, env=plain | given, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_stage_without_keys_is_the_users_mistake(moto: Server, tmp_path: Path) -> None:
    """Exit code 2 is never followed by another attempt."""
    stage = start_stage(moto.endpoint, tmp_path, {})
    _, said = stage.communicate(timeout=120)
    assert stage.returncode == 2, said
    assert re.search("error: .*~/.aws/credentials.*nodes", said.strip().splitlines()[-1])


@pytest.mark.slow
def test_a_stage_says_that_it_waits_for_a_store_that_does_not_answer(moto: Server, tmp_path: Path) -> None:
    stage = start_stage("http://127.0.0.1:1", tmp_path, moto.keys)
    assert stage.stderr is not None
    assert re.search("warning: waiting for the store: .*cannot read store.json", stage.stderr.readline())
    assert stage.poll() is None
    stage.kill()
    stage.communicate()
