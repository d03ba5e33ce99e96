"""Bad links: cut at any byte, slow, or dead without an error.

tests/host/devices/test_transports.py tests the transport itself. This file tests whole files, devices and fleets.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgert.errors import DeviceUnreachable
from edgert_deploy.devices.transports.ssh import SshTransport
from edgert_deploy.devices.transports.ssh_login import LinkLimits
from hil.support.relay import Relay
from hil.support.sshd import SshDevice, running_sshd

LINKS = 4  # this number of links is used at once
CUTS = 50  # each link is cut this number of times
SEED = 20261121
FILE_BYTES = 1_500_000  # large enough that most cuts fall into the file
PATIENT = LinkLimits(connect_s=20, keepalive_s=1, dead_after_s=10.0, attempts=40, pauses_s=(0.0,))


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshDevice]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.mark.timeout(900)
def test_a_transfer_that_is_cut_at_random_bytes_arrives_complete_or_not_at_all(sshd: SshDevice, tmp_path: Path) -> None:
    """Some cuts fall into the key exchange, some into the file, and some into the commands around the file."""
    with ThreadPoolExecutor(LINKS) as pool:
        files = pool.map(lambda link: _files_over_a_cut_link(sshd, tmp_path / str(link), link), range(LINKS))
    assert min(files) > 0


def _files_over_a_cut_link(sshd: SshDevice, folder: Path, link: int) -> int:
    """Send files until all planned cuts have happened; return the number of files that arrived."""
    chance = random.Random(SEED + link)
    source, there = folder / "source", folder / "far" / "file"
    there.parent.mkdir(parents=True)
    left = [chance.randrange(int(FILE_BYTES / 2)) for _ in range(CUTS)]
    files = 0
    with Relay(sshd.port, cut_after=left) as relay:
        while relay.connections < CUTS:
            source.write_bytes(chance.randbytes(FILE_BYTES))
            before = there.read_bytes() if there.exists() else None
            transport = SshTransport(sshd.device(port=relay.port), PATIENT)
            try:
                transport.put(source, str(there))
                assert there.read_bytes() == source.read_bytes()
                files += 1
            except DeviceUnreachable:  # the cut fell into a command around the file, so the old file stays
                assert (there.read_bytes() if there.exists() else None) == before
            finally:
                transport.close()
    transport = SshTransport(sshd.device(), PATIENT)
    transport.put(source, str(there))
    transport.close()
    assert there.read_bytes() == source.read_bytes()
    return files


def test_a_slow_link_is_not_taken_for_a_dead_link(sshd: SshDevice, tmp_path: Path) -> None:
    """Each block takes longer than the time-out, but data always moves."""
    source, there = tmp_path / "source", tmp_path / "far" / "file"
    source.write_bytes(os.urandom(400_000))
    limits = LinkLimits(connect_s=20, keepalive_s=1, dead_after_s=6.0, attempts=1, pauses_s=(0.0,))
    with Relay(sshd.port, bytes_per_s=40_000) as relay:
        transport = SshTransport(sshd.device(port=relay.port), limits)
        transport.put(source, str(there))
        transport.close()
    assert there.read_bytes() == source.read_bytes()
