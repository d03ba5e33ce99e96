"""A bundle is accepted only if every byte is as signed by a trusted key."""

from __future__ import annotations

import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgert.bundle.bundle_file import Bundle, open_bundle, write_bundle
from edgert.bundle.manifest import FileEntry, Manifest
from edgert.bundle.signing import SigningKey, new_key
from edgert.errors import BundleCorrupt, BundleError, SignatureInvalid, StorageFailed
from tests.support.bundles import make_null_bundle


@pytest.fixture
def path(tmp_path: Path, signing_key: SigningKey) -> Path:
    return make_null_bundle(tmp_path / "made", signing_key)


def read_all(path: Path, key: SigningKey) -> Manifest:
    with open_bundle(path, (key.public,)) as bundle:
        bundle.verify_files()
        return bundle.manifest


def test_a_bundle_opens_with_the_key_of_its_signature(path: Path, signing_key: SigningKey) -> None:
    with open_bundle(path, (new_key().public, signing_key.public)) as bundle:
        bundle.verify_files()
        assert bundle.signed_by == signing_key.public
        assert bundle.manifest.model == "echo"


def test_a_bundle_is_a_plain_tar_archive(path: Path, signing_key: SigningKey) -> None:
    with tarfile.open(path) as archive:
        names = archive.getnames()
    assert names == ["manifest.dsse.json", *(entry.path for entry in read_all(path, signing_key).files)]


def test_another_key_is_refused_and_the_error_names_both_keys(path: Path, signing_key: SigningKey) -> None:
    other = new_key()
    with pytest.raises(SignatureInvalid, match=signing_key.public.key_id) as caught:
        read_all(path, other)
    assert other.public.key_id in caught.value.message
    with pytest.raises(SignatureInvalid, match="trusted here: none"), open_bundle(path, ()):
        pass


def test_every_flipped_byte_is_refused(path: Path, signing_key: SigningKey, tmp_path: Path) -> None:
    whole = path.read_bytes()
    with open_bundle(path, None) as bundle:
        start = bundle._payload_start
    damaged = tmp_path / "damaged.edgert"
    damaged.write_bytes(whole)
    with damaged.open("r+b", buffering=0) as file:
        for at, byte in enumerate(whole):
            os.pwrite(file.fileno(), bytes([byte ^ (1 << at % 8)]), at)
            with pytest.raises(BundleError if at < start else BundleCorrupt):
                read_all(damaged, signing_key)
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert read_all(damaged, signing_key)


def test_every_truncation_is_refused(path: Path, signing_key: SigningKey, tmp_path: Path) -> None:
    cut = tmp_path / "cut.edgert"
    whole = path.read_bytes()
    cut.write_bytes(whole)
    for length in range(len(whole) - 1, -1, -1):
        os.truncate(cut, length)
        with pytest.raises(BundleError):
            read_all(cut, signing_key)


def test_an_error_names_its_file_although_two_bundles_are_open(
    path: Path, tmp_path: Path, signing_key: SigningKey
) -> None:
    other = tmp_path / "other.edgert"
    other.write_bytes(path.read_bytes() + b"x")
    with open_bundle(other, None) as damaged, open_bundle(path, None):
        for read in (damaged.verify_files, lambda: damaged.read_file("none", 1)):
            with pytest.raises(BundleError) as caught:
                read()
            assert str(caught.value).startswith(f"{other}: ")
    with pytest.raises(SignatureInvalid, match=f"^{path}: the bundle is signed by"), open_bundle(path, ()):
        pass
    other.write_bytes(b"hello")
    with (
        pytest.raises(
            BundleCorrupt, match=f"^{other}: this is not a bundle: give the .edgert file that edgert build wrote$"
        ),
        open_bundle(other, None),
    ):
        pass


@pytest.mark.parametrize("tail", [b"\0", b"x", bytes(512), bytes(10240)])
def test_bytes_behind_the_end_are_refused(path: Path, signing_key: SigningKey, tail: bytes) -> None:
    path.write_bytes(path.read_bytes() + tail)
    with pytest.raises(BundleCorrupt, match="follow the end"):
        read_all(path, signing_key)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_a_header_of_a_link_or_of_a_folder_or_of_a_device_is_refused(
    path: Path, signing_key: SigningKey, kind: bytes, tmp_path: Path
) -> None:
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as archive:
        member = archive.getmembers()[-1]
    info = tarfile.TarInfo(member.name)
    info.size, info.mode, info.type, info.linkname = member.size, 0o644, kind, "/etc/passwd"
    data[member.offset : member.offset + 512] = info.tobuf(tarfile.USTAR_FORMAT)[:512]
    path.write_bytes(data)
    (tmp_path / "out").mkdir()
    with open_bundle(path, (signing_key.public,)) as bundle, pytest.raises(BundleCorrupt, match="header"):
        bundle.unpack(tmp_path / "out", frozenset(entry.path for entry in bundle.manifest.files))


def test_a_link_in_the_target_folder_is_not_followed(path: Path, signing_key: SigningKey, tmp_path: Path) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("untouched")
    manifest = read_all(path, signing_key)
    target = out / manifest.files[0].path
    target.parent.mkdir(parents=True)
    target.symlink_to(victim)
    with open_bundle(path, (signing_key.public,)) as bundle, pytest.raises(StorageFailed):
        bundle.unpack(out, frozenset({manifest.files[0].path}))
    assert victim.read_text() == "untouched"


def test_only_the_requested_files_are_unpacked(path: Path, signing_key: SigningKey, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with open_bundle(path, (signing_key.public,)) as bundle:
        artifact = bundle.manifest.artifacts[0]
        bundle.unpack(out, frozenset(artifact.files))
        found = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
        assert found == set(artifact.files)
        for name in artifact.files:
            assert len((out / name).read_bytes()) == bundle.manifest.file(name).size_bytes
            assert (out / name).stat().st_mode & 0o777 == 0o644 & ~current_umask()


def test_a_disk_that_accepts_no_file_raises_storage_failed(path: Path, signing_key: SigningKey, tmp_path: Path) -> None:
    with open_bundle(path, (signing_key.public,)) as bundle, pytest.raises(StorageFailed):
        bundle.unpack(tmp_path / ("x" * 300), frozenset(bundle.manifest.artifacts[0].files))


def test_the_same_content_gives_the_same_bytes(tmp_path: Path, signing_key: SigningKey) -> None:
    one = make_null_bundle(tmp_path / "one", signing_key)
    two = make_null_bundle(tmp_path / "two" / "deeper", signing_key)
    assert one.read_bytes() == two.read_bytes()


def test_the_digest_depends_on_the_content_and_not_on_the_signature(tmp_path: Path, signing_key: SigningKey) -> None:
    def digest(path: Path) -> str:
        with open_bundle(path, None) as bundle:
            assert bundle.signed_by is None
            return bundle.digest

    one = digest(make_null_bundle(tmp_path / "one", signing_key))
    assert one == digest(make_null_bundle(tmp_path / "two", new_key()))
    assert one != digest(make_null_bundle(tmp_path / "three", signing_key, release=2))


def test_a_file_that_is_not_what_the_manifest_says_is_never_packed(
    path: Path, signing_key: SigningKey, tmp_path: Path
) -> None:
    manifest = read_all(path, signing_key)
    entry = manifest.files[0]
    files = {}
    for i, file in enumerate(manifest.files):
        files[file.path] = tmp_path / str(i)
        files[file.path].write_bytes(bytes(file.size_bytes))
    with pytest.raises(BundleCorrupt, match=entry.path):
        write_bundle(tmp_path / "out.edgert", manifest, files, signing_key)
    assert not list(tmp_path.glob("*.edgert"))
    assert not list(tmp_path.glob(".*partial"))


def test_other_files_are_refused(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("something"), io.BytesIO())
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for i, data in enumerate([b"", b"hello", bytes(512), np.random.default_rng(0).bytes(4096), archive.getvalue()]):
        file = tmp_path / str(i)
        file.write_bytes(data)
        with pytest.raises(BundleCorrupt), open_bundle(file, None):
            pass
    for path in (tmp_path, tmp_path / "missing", pipe, Path("/dev/null")):
        with pytest.raises(BundleCorrupt), open_bundle(path, None):
            pass


def test_a_bundle_contains_no_private_key(path: Path) -> None:
    with open_bundle(path, None) as bundle:
        assert isinstance(bundle, Bundle)
        assert b"PRIVATE" not in bundle.envelope.payload
        renamed = replace(bundle.manifest, files=(*bundle.manifest.files, FileEntry("extra", 0, "0" * 64)))
        assert renamed.to_bytes() != bundle.manifest.to_bytes()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
