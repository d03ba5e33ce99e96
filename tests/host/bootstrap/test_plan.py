"""The plan of a bootstrap."""

from __future__ import annotations

from pathlib import Path

from edgert_deploy.bootstrap.plan import _without_runtimes_own
from edgert_deploy.devices.device_files import DeviceFile
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports import open_transport


def test_a_host_of_another_version_does_not_rewrite_the_script_of_a_runtime_that_stays(tmp_path: Path) -> None:
    there = open_transport(Device("here", "local", str(tmp_path), "this-machine", str(tmp_path)))
    files = tuple(
        DeviceFile(str(tmp_path / change), b"of this host", change) for change in ("runtime.sh", "unit", "key 1")
    )
    configuration = DeviceFile(str(tmp_path / "config.toml"), b"", "configuration")
    assert _without_runtimes_own(files, there) == files, "what is missing is written"
    for file in files[:2]:
        Path(file.path).write_text("of another host")
    assert _without_runtimes_own(files, there) == files[2:]
    assert _without_runtimes_own((*files, configuration), there) == (*files[1:], configuration), "a unit follows it"
    Path(files[0].path).unlink()
    Path(files[0].path).symlink_to(files[1].path)
    assert _without_runtimes_own(files, there) == (files[0], files[2]), "a link is no script"
