"""Three releases over a bad link, by `edgert deploy`, scp and rsync.

The model is 26 MB of realistic INT8 weights (normally distributed, 7 bits of entropy each). In release 2, the last
fiftieth of the weights is new. In release 3, a twentieth of all weights differ by one. The device is a real sshd behind
a link of packets (`support/link.py`), by default with 5 Mbit/s, a round trip of 50 ms and 2 % loss. Bytes are counted
on the link in both directions, including lost packets. `edgert deploy` is the whole command: facts, delta, transfer,
install, trial, check, mark-good. scp and rsync only copy the bundle; rsync -z starts from the previous release. Compare
them with `send_seconds`, the time that deploy takes to ask for facts, make the delta and send it. The kernel's
congestion control is printed, because it changes the times: cubic takes losses for a full link, bbr does not.

    python -m bench.transfer
    python -m bench.transfer --size-mb 4 --json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench.support.bundles import int8_weights
from bench.support.devices import edgertd, start
from bench.support.link import HERE, Link, Quality, why_not
from bench.support.tables import emit
from edgert.bundle.signing import new_key
from edgert_deploy.devices.inventory import Inventory
from hil.support.keys import new_keys
from hil.support.sshd import SshDevice, start_sshd
from tests.support.bundles import make_null_bundle
from tests.support.paths import ROOT

COLUMNS = ("what", "release", "seconds", "send_seconds", "link_mb", "bytes_over_edgert", "seconds_over_edgert")
TOOL_S_MAX = 3600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=float, default=26.0, help="of weights (26)")
    parser.add_argument("--mbit", type=float, default=5.0, help="of each direction (5)")
    parser.add_argument("--delay-ms", type=float, default=50.0, help="there and back (50)")
    parser.add_argument("--loss", type=float, default=2.0, help="percent of packets (2)")
    parser.add_argument("--seed", type=int, default=1, help="of the losses (1)")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no link can be made here: {reason}")
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    print(f"TCP's congestion control here is {congestion}", file=sys.stderr)
    quality = Quality(options.mbit * 1e6, options.delay_ms / 2e3, options.loss / 100)
    with (
        tempfile.TemporaryDirectory(prefix="edgert-bench-", ignore_cleanup_errors=True) as folder,
        Link(quality, options.seed) as link,
    ):
        rows = measure(Path(folder), link, int(options.size_mb * 1e6))
    emit(rows, COLUMNS, options.json)


def measure(folder: Path, link: Link, size_bytes: int) -> list[dict[str, object]]:
    key = new_key()
    bundles = [
        make_null_bundle(folder / "bundles", key, "model", release, padding=int8_weights(release, size_bytes))
        for release in (1, 2, 3)
    ]
    sshd = _sshd(folder / "device")
    rows: list[dict[str, object]] = []
    try:
        start(sshd.state, key.public.pem())
        device = replace(sshd.device(), address=sshd.address.replace("127.0.0.1", HERE))
        Inventory(folder / "conf" / "inventory.toml").add(device)
        _edgertd_over_there(Path(device.home))
        (folder / "copies").mkdir()
        for release, bundle in enumerate(bundles, start=1):
            for what, command in _commands(sshd, bundle, folder / "copies").items():
                print(f"{what}, release {release}", file=sys.stderr)
                rows.append({"what": what, "release": release, **timed(link, folder, command)})
            ours = next(row for row in rows if row["what"] == "edgert" and row["release"] == release)
            for row in rows[-2:]:
                row["bytes_over_edgert"] = round(float(str(row["link_mb"])) / float(str(ours["link_mb"])), 2)
                row["seconds_over_edgert"] = round(float(str(row["seconds"])) / float(str(ours["send_seconds"])), 2)
            for tool in ("scp", "rsync"):
                assert (folder / "copies" / f"{tool}.edgert").read_bytes() == bundle.read_bytes()
        live = next(model for model in edgertd(sshd.state, "status")["models"] if model["model"] == "model")
        assert live["live"]["release"] == len(bundles)
    finally:
        if sshd.state.exists():
            edgertd(sshd.state, "stop")
        sshd.stop()
    return rows


def timed(link: Link, folder: Path, command: list[str]) -> dict[str, float]:
    environment = {
        **os.environ,
        "EDGERT_CONFIG_DIR": str(folder / "conf"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "deploy"), os.environ.get("PYTHONPATH", "")]),
    }
    bytes_before, begun = link.bytes_carried, time.monotonic()
    done = subprocess.run(
        [*link.within, *command], env=environment, capture_output=True, text=True, timeout=TOOL_S_MAX, check=False
    )
    seconds = time.monotonic() - begun
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr or done.stdout}")
    sent = json.loads(done.stdout)["devices"][0]["send_seconds"] if done.stdout else seconds
    return {
        "seconds": round(seconds, 1),
        "send_seconds": round(sent, 1),
        "link_mb": round((link.bytes_carried - bytes_before) / 1e6, 2),
    }


def _commands(sshd: SshDevice, bundle: Path, copies: Path) -> dict[str, list[str]]:
    key = ["-i", str(sshd.client_key), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    user = sshd.address.partition("@")[0]
    ssh = f"ssh -p {sshd.port} {' '.join(key)}"
    return {
        "edgert": [sys.executable, "-m", "edgert_deploy.cli", "deploy", str(bundle), "board", "--json"],
        # The device has no SFTP, so scp needs its older protocol.
        "scp": ["scp", "-O", "-P", str(sshd.port), *key, str(bundle), f"{user}@{HERE}:{copies}/scp.edgert"],
        "rsync": ["rsync", "-z", "--no-times", "-e", ssh, str(bundle), f"{user}@{HERE}:{copies}/rsync.edgert"],
    }


def _sshd(folder: Path) -> SshDevice:
    (folder / "home").mkdir(parents=True)
    new_keys(folder)
    shutil.copy(folder / "client_key.pub", folder / "authorized_keys")
    return start_sshd(folder, more=f"ListenAddress {HERE}\n")


def _edgertd_over_there(home: Path) -> None:
    """Install the files that a bootstrap makes, but with this interpreter."""
    program = home / "venv" / "bin" / "edgertd"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m edgert.cli "$@"\n')
    program.chmod(0o755)


if __name__ == "__main__":
    main()
