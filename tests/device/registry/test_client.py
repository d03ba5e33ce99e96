from __future__ import annotations

import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from edgert.errors import (
    EdgeRTError,
    NotInRegistry,
    RegistryCorrupt,
    RegistryError,
    RegistryLoginRefused,
    RegistryUnreachable,
)
from edgert.registry.address import digest_of
from edgert.registry.client import Blob, Registry
from edgert.registry.login import Credentials
from tests.support.servers.answering import Answer, answering, answers
from tests.support.servers.registries import Mirror, Proxy, RegistryServer

CONTENT = os.urandom(300_000)
BLOB = Blob(digest_of(CONTENT), len(CONTENT))
LAST = f"bytes {len(CONTENT) - 1}-{len(CONTENT) - 1}/{len(CONTENT)}"  # a Content-Range
EMPTY = b"{}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    with RegistryServer.in_folder(tmp_path_factory.mktemp("registry"), secured=True) as running:
        running.registry().upload(BLOB, CONTENT)
        yield running


def manifest_of(*blobs: Blob, **annotations: str) -> bytes:
    def described(blob: Blob) -> dict[str, object]:
        return {"mediaType": "application/octet-stream", "digest": blob.digest, "size": blob.size_bytes}

    value = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": described(blobs[0]),
        "layers": [described(blob) for blob in blobs],
        "annotations": annotations,
    }
    return json.dumps(value).encode()


# --- a real registry ------------------------------------------------------------------------


def test_a_blob_is_read_back_unchanged(server: RegistryServer, tmp_path: Path) -> None:
    registry, counts = server.registry(), list[int]()
    assert registry.has(BLOB)
    assert not registry.has(Blob("sha256:" + "0" * 64, 1))
    registry.download(BLOB, tmp_path / "part", counts.append)
    assert (tmp_path / "part").read_bytes() == CONTENT
    assert sum(counts) == len(CONTENT)
    assert registry.read(BLOB, len(CONTENT)) == CONTENT


def test_the_upload_of_a_file_reports_the_bytes_that_are_sent(server: RegistryServer, tmp_path: Path) -> None:
    data = os.urandom(200_000)
    (tmp_path / "file").write_bytes(data)
    counts, blob = list[int](), Blob(digest_of(data), len(data))
    server.registry().upload(blob, tmp_path / "file", counts.append)
    assert sum(counts) == len(data)
    assert server.registry().has(blob)


def test_an_empty_blob_exists_after_its_upload(server: RegistryServer) -> None:
    empty = Blob(digest_of(b""), 0)
    server.registry().upload(empty, b"")
    assert server.registry().has(empty)


@pytest.mark.parametrize("there", [1, 100_000, len(CONTENT) - 1, len(CONTENT)])
def test_a_download_continues_where_it_broke_off(server: RegistryServer, tmp_path: Path, there: int) -> None:
    part, counts = tmp_path / "part", list[int]()
    part.write_bytes(CONTENT[:there])
    server.registry().download(BLOB, part, counts.append)
    assert part.read_bytes() == CONTENT
    assert sum(counts) == len(CONTENT) - there


def test_fetched_bytes_stay_when_the_caller_stops(server: RegistryServer, tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def stop(count: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        server.registry().download(BLOB, tmp_path / "part", stop)
    there = (tmp_path / "part").stat().st_size
    assert 0 < there < len(CONTENT)
    server.registry().download(BLOB, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == CONTENT


def test_a_partial_file_with_wrong_bytes_is_removed(server: RegistryServer, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(bytes(1000))
    with pytest.raises(RegistryCorrupt):
        server.registry().download(BLOB, tmp_path / "part")
    assert not (tmp_path / "part").exists()


def test_a_part_that_is_too_long_is_fetched_anew(server: RegistryServer, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(bytes(len(CONTENT) + 1))
    server.registry().download(BLOB, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == CONTENT


def test_a_manifest_is_fetched_only_when_it_changed(server: RegistryServer) -> None:
    registry = server.registry()
    digest = registry.put_manifest("steady", manifest_of(BLOB, note="one"))
    fetched = registry.manifest("steady")
    assert fetched is not None
    assert fetched.digest == digest
    assert registry.manifest("steady", digest) is None
    assert '" 304 0 ' in server.requests[-1]  # the registry sent no body
    registry.put_manifest("steady", manifest_of(BLOB, note="two"))
    assert registry.manifest("steady", digest) is not None
    assert registry.manifest(digest) == fetched  # the old one stays under its digest


def test_the_error_names_the_missing_manifest_or_blob(server: RegistryServer, tmp_path: Path) -> None:
    with pytest.raises(NotInRegistry, match="manifest nothing"):
        server.registry().manifest("nothing")
    with pytest.raises(NotInRegistry, match="sha256:000"):
        server.registry().download(Blob("sha256:" + "0" * 64, 1), tmp_path / "part")


def test_a_wrong_password_is_refused(server: RegistryServer) -> None:
    wrong = Credentials("publisher", "wrong")
    with pytest.raises(RegistryLoginRefused, match="'publisher'"):
        Registry(server.repository, wrong, server.ca).manifest("steady")
    with pytest.raises(RegistryLoginRefused, match="docker login"):
        Registry(server.repository, None, server.ca).manifest("steady")


def test_a_caching_mirror_asks_the_registry_once_for_each_blob_and_manifest(
    server: RegistryServer, tmp_path: Path
) -> None:
    digest = server.registry().put_manifest("mirrored", manifest_of(BLOB))
    with Mirror(tmp_path / "mirror", server) as mirror:
        before = len(server.requests)
        for i in range(3):
            mirror.registry().download(BLOB, tmp_path / f"part-{i}")
            assert mirror.registry().manifest("mirrored", digest) is None
        (tmp_path / "part-0").write_bytes(CONTENT[:100_000])
        mirror.registry().download(BLOB, tmp_path / "part-0")  # continues
        assert (tmp_path / "part-0").read_bytes() == CONTENT
        # The requests of the mirror. Each may follow a first request without the login.
        assert len([line for line in server.requests[before:] if "/blobs/" in line]) == 1
        assert len([line for line in server.requests[before:] if "/manifests/" in line]) <= 2
        with pytest.raises(RegistryError):
            mirror.registry().put_manifest("written", manifest_of(BLOB))
        server.stop()
        try:
            assert mirror.registry().read(BLOB, len(CONTENT)) == CONTENT
            assert mirror.registry().manifest("mirrored", digest) is None
        finally:
            server.start()


def test_the_error_about_a_too_large_upload_names_the_limit_of_the_proxy(tmp_path: Path) -> None:
    """nginx accepts 1 MB by default."""
    large = os.urandom(2_000_000)
    with RegistryServer.in_folder(tmp_path / "registry") as server, Proxy(tmp_path / "proxy", server) as proxy:
        proxy.registry().upload(BLOB, CONTENT)
        assert proxy.registry().read(BLOB, len(CONTENT)) == CONTENT
        with pytest.raises(RegistryError, match=r"too large.*client_max_body_size"):
            proxy.registry().upload(Blob(digest_of(large), len(large)), large)


# --- hostile registries ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (answers(500), RegistryUnreachable),
        (answers(429, Retry_After="90"), RegistryUnreachable),
        (answers(418), RegistryError),
        (answers(401, WWW_Authenticate="Magic spell"), RegistryError),
        (answers(401, WWW_Authenticate='Bearer realm="ftp://127.0.0.1/"'), RegistryError),
        (answers(302, Location="http://127.0.0.1:1/"), RegistryUnreachable),
        (answers(302, Location="file:///etc/passwd"), RegistryError),
        (answers(302, Location="http://[bad/"), RegistryError),
        (answers(302, Location="http://127.0.0.1:99999999/"), RegistryError),
        (answers(401, WWW_Authenticate='Bearer realm="http://[bad/"'), RegistryError),
        (answers(302, Location="/v2/plant/models/blobs/again"), RegistryError),
        (answers(304), RegistryError),
        (answers(400, b'{"errors": [' * 100), RegistryError),
        (answers(400, b'{"errors": [{"code": 7}]}', Content_Length="1000000"), RegistryError),
        (answers(200, CONTENT[:-1]), RegistryCorrupt),
        (answers(200, CONTENT + b"more"), RegistryCorrupt),
        (answers(200, bytes(len(CONTENT))), RegistryCorrupt),
        (answers(206, CONTENT, Content_Range="bytes 7-9/10"), RegistryCorrupt),
        (answers(200, CONTENT, Transfer_Encoding="chunked"), RegistryCorrupt),
        (answers(200, CONTENT[:-1], Content_Length=str(len(CONTENT))), RegistryUnreachable),
        (lambda handler: handler.wfile.write(b"garbage\r\n\r\n"), RegistryUnreachable),
        (lambda handler: None, RegistryUnreachable),
    ],
)
def test_each_wrong_answer_has_its_error(answer: Answer, error: type[EdgeRTError], tmp_path: Path) -> None:
    with answering(answer) as repository, pytest.raises(error) as raised:
        Registry(repository).download(BLOB, tmp_path / "part")
    assert type(raised.value) is error
    assert not (tmp_path / "part").exists() or (tmp_path / "part").stat().st_size < len(CONTENT)


@pytest.mark.parametrize(
    ("answer", "holds"),
    [
        (answers(206, b"x", Content_Range=LAST), True),
        (answers(200, CONTENT), True),  # without ranges
        (answers(200, CONTENT[:-1]), False),
        (answers(206, b"", Content_Length="1", Content_Range=LAST), False),
        (answers(206, b"x", Content_Range=f"{LAST}7"), False),
        (answers(416), False),
    ],
)
def test_a_registry_holds_a_blob_if_it_gives_the_last_byte(answer: Answer, holds: bool) -> None:
    with answering(answer) as repository:
        assert Registry(repository).has(BLOB) is holds


@pytest.mark.parametrize("status", [400, 403, 405, 412, 500])
def test_the_registrys_own_reason_is_reported(status: int) -> None:
    body = json.dumps({"errors": [{"code": "DENIED", "message": "the quota\nis used up" + "!" * 500}]}).encode()
    with answering(answers(status, body)) as repository, pytest.raises(RegistryError) as raised:
        Registry(repository).manifest("stable")
    assert "(DENIED the quota is used up!!!" in raised.value.message
    assert len(raised.value.message) < 450
    assert "is a registry's" not in raised.value.message


def test_the_error_of_an_upload_says_that_the_repository_must_be_created_first(tmp_path: Path) -> None:
    body = b'{"errors": [{"code": "NAME_UNKNOWN", "message": "project plant not found"}]}'
    with (
        answering(answers(404, body)) as repository,
        pytest.raises(
            NotInRegistry, match=r"accepts no upload \(NAME_UNKNOWN project plant.*first create the repository"
        ),
    ):
        Registry(repository).upload(BLOB, CONTENT)


def test_an_endless_manifest_is_cut_off() -> None:
    with answering(answers(200, bytes(2 * 1024**2))) as repository, pytest.raises(RegistryCorrupt, match="longer than"):
        Registry(repository).manifest("stable")


def test_an_overloaded_registry_may_say_when_to_ask_again() -> None:
    with answering(answers(503, Retry_After="90")) as repository, pytest.raises(RegistryUnreachable) as raised:
        Registry(repository).manifest("stable")
    assert raised.value.retry_after_s == 90


def test_a_blob_that_comes_too_slowly_is_given_up(tmp_path: Path) -> None:
    times = iter(range(0, 10_000_000, 100))  # each piece takes 100 seconds
    with answering(answers(200, CONTENT)) as repository:
        registry = Registry(repository, clock=lambda: next(times))
        with pytest.raises(RegistryUnreachable, match="less than 1000 bytes a second"):
            registry.download(BLOB, tmp_path / "part")
    assert (tmp_path / "part").stat().st_size > 0  # the next attempt continues


def test_a_token_answers_a_bearer_challenge(tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if handler.path.startswith("/token"):
            asked.append(f"{handler.path} {handler.headers['Authorization']}")
            answers(200, b'{"token": "good"}')(handler)
        elif handler.headers["Authorization"] == "Bearer good":
            answers(200, CONTENT)(handler)
        else:
            realm = f"http://{handler.headers['Host']}/token"
            challenge = f'Bearer realm="{realm}",service="here",scope="repository:plant/models:pull"'
            answers(401, WWW_Authenticate=challenge)(handler)

    with answering(answer) as repository:
        registry = Registry(repository, Credentials("pi", "secret"))
        registry.download(BLOB, tmp_path / "one")
        registry.download(BLOB, tmp_path / "two")
    assert asked == ["/token?service=here&scope=repository%3Aplant%2Fmodels%3Apull Basic cGk6c2VjcmV0"]
