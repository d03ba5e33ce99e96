"""A container leaves nothing on this machine. The other tests in this folder use containers as devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hil.support.containers import Container
from tests.support.paths import ROOT

_MAKE = """
import sys, time
from pathlib import Path
from hil.support.containers import Container
container = Container(Path(sys.argv[1]))
container.make()
print(container.name, flush=True)
time.sleep(9999)
"""


def test_the_remains_of_a_killed_run_are_removed_with_the_next_container(containers_run: None, tmp_path: Path) -> None:
    killed = subprocess.Popen(
        [sys.executable, "-c", _MAKE, str(tmp_path / "killed")], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert killed.stdout is not None
    name = killed.stdout.readline().strip()
    mounts, places = Path("/proc/self/mountinfo"), [Path("/run/netns", name), Path("/sys/class/net", name)]
    assert f" {name} " in mounts.read_text()
    assert all(place.exists() for place in places)
    beside = Container(tmp_path / "beside")
    assert f" {name} " in mounts.read_text(), "a container of a living process stays"
    killed.kill()
    killed.communicate()
    (tmp_path / "killed").rename(tmp_path / "moved")  # pytest renames a folder in this way before it removes it
    Container(tmp_path / "next").remove()
    beside.remove()
    assert f" {name} " not in mounts.read_text()
    assert not any(place.exists() for place in places)
