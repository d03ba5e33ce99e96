"""The cost of `edgert deploy` for its host as the fleet grows: wall, processor and memory.

A stand-in is a folder behind one real sshd, whose `edgertd` is a shell script with ready answers. The host does all the
work of a real deployment: login, host key, facts, claim, delta, upload with its hash, install, activate, check, mark
good. Stand-ins and sshd share this machine with the host, so `wall_s` includes their work. `cpu_s` and `memory_mb` are
those of the process `edgert deploy` alone. `more_*` compares each fleet with the previous fleet: it is the cost of one
more device.

    python -m bench.rollout                                     # 10, 100 and 1,000 stand-ins: some minutes
    python -m bench.rollout --devices 10,200 --parallel 8 --json
    python -m bench.rollout --containers 2 --daemons 3          # real daemons in containers with systemd (as root)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.support.stand_ins import stand_ins
from bench.support.tables import emit
from edgert.bundle.signing import new_key, write_key_pair
from edgert_deploy.common.keys import key_paths
from edgert_deploy.common.parallel import at_once_here
from edgert_deploy.devices.inventory import Device, Inventory
from hil.support.containers import running_container
from hil.support.containers import why_not as why_no_containers
from hil.support.dut import Dut, reached
from hil.support.host import Host
from hil.support.sshd import running_sshd
from tests.support.bundles import make_null_bundle
from tests.support.paths import ROOT

COLUMNS = ("devices", "parallel", "wall_s", "cpu_s", "cpu_ms_each", "memory_mb", "more_cpu_ms_each", "more_kb_each")
PROFILE = "generic-x86-64"


@dataclass(frozen=True)
class Cost:
    """The cost of one `edgert deploy`. `more_*` is the cost of each device that the previous fleet did not have."""

    devices: int
    parallel: int
    wall_s: float
    cpu_s: float
    memory_mb: float
    cpu_ms_each: float = 0.0
    more_cpu_ms_each: float = 0.0
    more_kb_each: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="10,100,1000", help="the sizes of the fleets of stand-ins")
    parser.add_argument("--parallel", type=int, default=at_once_here(), help="devices at a time (as deploy chooses)")
    parser.add_argument("--containers", type=int, default=0, help="containers with real daemons instead of stand-ins")
    parser.add_argument("--daemons", type=int, default=3, help="daemons in each container")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    options = parser.parse_args()
    if options.containers and (reason := why_no_containers()):
        sys.exit(f"no container runs here: {reason}")
    with tempfile.TemporaryDirectory(prefix="edgert-bench-") as name:
        if options.containers:
            with real_daemons(Path(name), options.containers, options.daemons) as (host, devices):
                sizes = sorted({1, options.daemons, len(devices)})
                costs = measured(host, devices, sizes, options.parallel, PROFILE)
        else:
            sizes = [int(size) for size in options.devices.split(",")]
            with simulated(Path(name), max(sizes)) as (host, devices):
                costs = measured(host, devices, sizes, options.parallel, "this-machine")
    rows = [{key: round(value, 4) for key, value in asdict(cost).items()} for cost in costs]
    emit(rows, COLUMNS, options.json)


def measured(host: Host, devices: Sequence[Device], sizes: Sequence[int], parallel: int, profile: str) -> list[Cost]:
    """For each size, deploy a new release to this number of `devices`."""
    costs: list[Cost] = []
    deploy(host, make_null_bundle(host.folder, host.key, release=1, profile=profile), devices[:1], 1)  # warm caches
    for release, size in enumerate(sizes, start=2):
        bundle = make_null_bundle(host.folder, host.key, release=release, profile=profile)
        cost = deploy(host, bundle, devices[-size:], parallel)
        if costs:
            last, more = costs[-1], cost.devices - costs[-1].devices
            cost = replace(
                cost,
                more_cpu_ms_each=(cost.cpu_s - last.cpu_s) * 1e3 / more,
                more_kb_each=(cost.memory_mb - last.memory_mb) * 1e3 / more,
            )
        costs.append(cost)
        print(f"{size} devices: {cost.wall_s:.1f} s", file=sys.stderr)
    return costs


def deploy(host: Host, bundle: Path, devices: Sequence[Device], parallel: int) -> Cost:
    """Run the real command over an inventory of `devices`; return its cost."""
    inventory = host.folder / f"fleet-{len(devices)}.toml"
    inventory.write_text("".join(table(device) for device in devices))
    words = ["deploy", str(bundle), "all", "--inventory", str(inventory), "--parallel", str(parallel), "--json"]
    said = host.folder / "said"
    with said.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", WITH_COST, *words], stdout=out, stderr=out, env=host.environment, cwd=ROOT
        )
        code = process.wait()
    assert code == 0, said.read_text()[-3000:]
    cost = json.loads(said.read_text().splitlines()[-1])
    return Cost(
        len(devices), parallel, cost["wall_s"], cost["cpu_s"], cost["memory_mb"], cost["cpu_s"] * 1e3 / len(devices)
    )


# The cost of `edgert` itself: starting Python and importing it are not counted.
WITH_COST = """\
import json, resource, sys, time
from edgert_deploy.cli import main
import edgert_deploy.cli.deploy, edgert_deploy.devices.transports.ssh
wall, cpu = time.monotonic(), time.process_time()
code = main()
used = {"wall_s": time.monotonic() - wall, "cpu_s": time.process_time() - cpu,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6}
print("\\n" + json.dumps(used), flush=True)
sys.exit(code)
"""


def table(device: Device) -> str:
    values = {key: value for key, value in asdict(device).items() if value not in ("", (), False) and key != "name"}
    return f"[devices.{device.name}]\n" + "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in {**values, "same_machine": True}.items()
    )


@contextmanager
def simulated(folder: Path, count: int) -> Iterator[tuple[Host, list[Device]]]:
    """Yield a host and `count` stand-ins behind one sshd."""
    key = new_key()
    write_key_pair(key, *key_paths(folder / "host/keys", "default"))
    host = Host(folder / "host")
    with running_sshd(folder / "sshd") as server:
        yield host, stand_ins(folder / "devices", count, key, server.device())


@contextmanager
def real_daemons(folder: Path, containers: int, daemons: int) -> Iterator[tuple[Host, list[Device]]]:
    """Yield a host and bootstrapped devices: `daemons` in each container, under edgertd's own monitor."""
    host = Host(folder)
    host.edgert("keys", "new")
    inventory = Inventory(folder / "inventory.toml")
    with ExitStack() as stack:
        for n in range(containers):
            place = folder / f"container-{n}"
            place.mkdir()
            there = stack.enter_context(running_container(place))
            for m in range(daemons):
                dut = reached(Dut(f"c{n}-d{m}", PROFILE), there)
                inventory.add(
                    Device(
                        dut.name,
                        "ssh",
                        dut.address,
                        PROFILE,
                        f"/var/lib/edgert-{m}",
                        f"/opt/edgert-{m}",
                        there.host_key,
                        dut.identity,
                        same_machine=True,
                    )
                )
        host.edgert("bootstrap", "all", "--engines", "null", "--service", "monitor")
        yield host, inventory.devices()


if __name__ == "__main__":
    main()
