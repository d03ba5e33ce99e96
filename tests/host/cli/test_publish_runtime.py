"""`edgert publish-runtime`, into a real registry, with wheels from the package index."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import edgert
from edgert.bundle.runtime_release import read_runtime
from edgert.names import RUNTIME
from edgert.registry.client import Blob
from tests.support.commands import Edgert, own_key
from tests.support.servers.registries import RegistryServer

PYTHON = "{}.{}".format(*sys.version_info)
PROFILE = """
name = "tiny"
description = "A device for tests"
machines = ["x86_64"]
engines = ["null"]
precision = "fp32"
python = "3.10"
glibc = "2.28"
memory_mb = 64
socket = "/run/edgert/edgert.sock"
"""


@pytest.mark.timeout(600)
def test_a_runtime_is_published_once_and_can_be_offered_and_promoted_and_halted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    edgert_, key = Edgert(capfd), own_key(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGERT_CONFIG_DIR", str(tmp_path / "conf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles/tiny.toml").write_text(PROFILE)
    chosen = ("--profile", "tiny", "--python", PYTHON)
    with RegistryServer.in_folder(tmp_path / "registry") as server:
        (tmp_path / "edgert.toml").write_text(f'[registry]\naddress = "{server.address}"\n[trial]\np99_ms = 8\n')
        code, said = edgert_("publish-runtime", 1, *chosen, "--channel", "canary", "--share", "5%")
        assert code == 0, said
        assert said["release"]["tag"] == "edgert.runtime-1"
        assert said["release"]["sent_bytes"] > 1_000_000
        (entry,) = said["channel"]["entries"]
        assert (entry["model"], entry["limits"], entry["watch_s"], entry["share"]) == (RUNTIME, {}, 600.0, 0.05)
        assert entry["profiles"] == ["tiny"]

        code, again = edgert_("publish-runtime", 1, *chosen)
        assert (code, again["release"]["sent_bytes"]) == (0, 0)
        code, said = edgert_("publish-runtime", 1, *chosen, "--with", "text")
        assert (code, "A release is immutable" in said["error"]["message"]) == (4, True)

        code, said = edgert_("promote", RUNTIME, "--from", "canary", "--to", "stable", "--watch", "5m")
        assert (code, said["channel"]["entries"][0]["watch_s"]) == (0, 300.0)
        code, said = edgert_("promote", RUNTIME, "--to", "stable", "--limit", "p99_ms=8")
        assert (code, "a runtime has no trial limits" in said["error"]["message"]) == (4, True)
        code, said = edgert_("channel", "halt", "stable", RUNTIME)
        assert (code, said["channel"]["entries"][0]["halted"]) == (0, True)

        registry = server.registry()
        layers = registry.manifest("edgert.runtime-1")
        assert layers is not None
        listed = layers.data.decode()
        assert f"edgert-{edgert.__version__}-py3-none-any.whl" in listed
        envelope = _envelope(listed)
        release, _ = read_runtime(registry.read(envelope, 1 << 20), (key.public,))
        (target,) = release.targets
        assert (target.python, target.machine, target.engines) == (PYTHON, "x86_64", ("null",))
        names = {wheel.name.partition("-")[0] for wheel in target.wheels}
        assert names >= {"edgert", "numpy", "pip", "urllib3", "cffi", "pycparser"}
        # cryptography requires it if the Python is old. The lock has it for other packages, too.
        assert ("typing_extensions" in names) == (sys.version_info < (3, 11))
        assert all(registry.has(Blob(f"sha256:{wheel.sha256}", wheel.size_bytes)) for wheel in target.wheels)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--python", "3.11"], 2, "Missing option '--profile'"),
        (["--python", "three", "--profile", "raspberry-pi-4"], 4, "give two numbers, such as 3.11"),
    ],
)
def test_options_that_make_no_runtime_are_refused_before_a_request(
    capfd: pytest.CaptureFixture[str], words: list[str], code: int, says: str
) -> None:
    ended, said = Edgert(capfd)("publish-runtime", 1, *words)
    assert (ended, says in said["error"]["message"]) == (code, True), said


def _envelope(manifest: str) -> Blob:
    layer = json.loads(manifest)["layers"][0]
    return Blob(layer["digest"], layer["size"])
