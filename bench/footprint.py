"""Memory and processor time of the daemon with one small model (digits, INT8), busy and idle.

- **Memory** (PSS) of the supervisor and of the worker. A second figure for the worker omits the memory that the engine
  and the model add to a Python with NumPy; separate processes measure this memory.
- **Many models** (`--models`; copies of three models in FP32, from 0.3 to 14 MB): memory of all processes, and its
  share of the memory of one FastAPI process with the same artifacts, threads and requests.
- **Large requests** (MobileNetV2 in FP32 on ONNX Runtime; six clients, eight items per request): memory of the worker
  before the large requests, after them, and when the clients are silent. Also the time of a request before them, and of
  the first request after the silence.
- **Learning** (MobileNetV2 and ResNet-50 in FP32 on ONNX Runtime): the largest memory of all processes while a model is
  loaded and measured for the first time, and the memory 10 s later. The memory after 30 more seconds is subtracted.
- **A further worker**: the time from its start to `ready` without the engine's load, for a fork and for a separate
  program.
- **Idle**: processor time and wake-ups of all processes of the daemon over `--idle-seconds`, after requests, with one
  client connected, and with the telemetry forwarder connected to a mosquitto if one is installed.
- **A round** of the follower that finds no news: processor time and largest memory. Between two rounds, nothing runs.
- **Cold start**: the time from the start of the daemon's process to the first answer, with and without learned
  settings, and the time of a Python that only imports the engine. Other work on the machine lengthens these times, but
  not the processor time.

    python -m bench.footprint            # a table
    python -m bench.footprint --json     # JSON lines
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.architectures import write_model
from bench.support.devices import BenchModel, device_with, digits_device, edgertd, serving
from bench.support.live_artifact import live_artifact
from bench.support.peer_servers.environments import default_folder
from bench.support.peer_servers.servers import running
from bench.support.peer_servers.session import write_spec
from bench.support.processes import children_cpu_s, processes
from bench.support.tables import emit
from edgert import Client
from edgert.bundle.signing import new_key
from edgert.daemon.workers.fork_server import Process, WorkerStarter, start_alone
from edgert.daemon.workers.worker_process import WorkerProcess
from edgert.errors import Unavailable
from edgert.machine import process_mb
from edgert.state_dir import StateDir
from edgert.versions.slot_store import SlotStore
from edgert.worker_link import link
from edgert.worker_link.load_message import LoadMessage
from edgert_deploy.rollout.channels import Channels, SeenCounters
from tests.support.paths import DIGITS, ROOT
from tests.support.servers.brokers import Broker
from tests.support.servers.registries import RegistryServer

COLUMNS = ("what", "seen", "unit", "target", "met")
START_S_MAX = 60.0
SETTLE_S = 5.0
REQUESTS = 50  # the number of requests to each of many models
SILENT_S = 15.0
WATCH_STEP_S = 0.02
RETURN_S = 10.0  # after the load, the memory of learning must be free within this time
RETURNED_MB = 5.0

# Each process stays until the end, so that all processes are measured at once.
WITH_NUMPY = "import numpy, sys; print('ready', flush=True); sys.stdin.read()"
WITH_ENGINE = """
import sys
from pathlib import Path
import numpy
from bench.support.peer_servers.session import open_first
session = open_first(Path(sys.argv[1]))
session.run([numpy.zeros((1, *session.inputs[0].item_shape), session.inputs[0].dtype)])
print("ready", flush=True)
sys.stdin.read()
"""

ROUND = """
import sys, time
from edgert.cli import main
code = main()
pss = next(line for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:"))
print(time.process_time(), pss.split()[1])
sys.exit(code)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--models", type=int, nargs="*", default=[3, 10])
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        config = stack.enter_context(broker_config())
        state, path = stack.enter_context(digits_device(config))
        rows = [
            *memory(state, path),
            *large_requests(),
            *learning("mobilenet_v2"),
            *learning("resnet_50"),
            *further_workers(state, options.starts),
            *idle(state, path, options.idle_seconds),
            *rounds(state, options.starts),
            *cold_start(state, path, options.starts),
        ]
    for count in options.models:
        rows += many_models(count)
    emit(rows, COLUMNS, options.json)


def memory(state: Path, path: Path) -> list[dict[str, Any]]:
    print("memory", file=sys.stderr)
    ask(path, 200)
    supervisor, worker = edgertd(state, "status")["daemon"]["pid"], serving(state, "digits")["pid"]
    spec = state.parent / "spec.json"
    write_spec(spec, {"digits": (live_artifact(state), serving(state, "digits")["threads"])})
    with bare(WITH_NUMPY) as plain, bare(WITH_ENGINE, str(spec)) as loaded:
        engine_mb = mb(loaded) - mb(plain)
        supervisor_mb, worker_mb = mb(supervisor), mb(worker)
    return [
        row("supervisor", supervisor_mb, "MB PSS", 25.0),
        row("worker", worker_mb, "MB PSS"),
        row("engine and weights", engine_mb, "MB PSS"),
        row("worker above engine and weights", worker_mb - engine_mb, "MB PSS", 30.0),
    ]


def many_models(count: int) -> list[dict[str, Any]]:
    """Start a daemon with the models, and a FastAPI process. Measure their memory after both have answered."""
    print(f"{count} models", file=sys.stderr)
    kinds = ("mlp", "cnn", "mobilenet_v2")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgert-models-")))
        files = {kind: write_model(kind, folder, calibration=16, holdout=16) for kind in kinds[:count]}
        models = [BenchModel(f"{kinds[i % 3]}{i // 3}", *files[kinds[i % 3]], precision="fp32") for i in range(count)]
        state, path = stack.enter_context(device_with(models, "[serving]\ncache_mb = 0\n"))
        with Client(path, timeout_s=600.0) as client:
            for model in models:
                (item,) = model.items(1)
                for _ in range(REQUESTS):
                    client.infer(model.name, item, cache=False)
        status = edgertd(state, "status")
        threads = {entry["model"]: entry["serving"]["threads"] for entry in status["models"]}
        spec = state.parent / "spec.json"
        write_spec(spec, {name: (live_artifact(state, name), count) for name, count in threads.items()})
        first = models[0]
        server = stack.enter_context(
            running("fastapi-unix", default_folder(), state.parent, spec, first.name, first.items(1)[0])
        )
        for model in models:
            (item,) = model.items(1)
            ask_peer = server.asking(model.name, item)
            for _ in range(REQUESTS):
                ask_peer(item)
        ours = sum(mb(pid) for pid in processes(status["daemon"]["pid"]))
        theirs = sum(mb(pid) for pid in processes(server.pid))
    return [
        row(f"{count} models", ours, "MB PSS"),
        row(f"{count} models, share of FastAPI's memory", ours / theirs, "", 1.2 if count <= 3 else 1.5),
    ]


def large_requests() -> list[dict[str, Any]]:
    """Measure a worker whose clients send large requests and then none. Time one request before and after."""
    print("large requests", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgert-models-")))
        model = BenchModel("m", *write_model("mobilenet_v2", folder, calibration=16, holdout=16), precision="fp32")
        state, path = stack.enter_context(device_with([model], "[serving]\ncache_mb = 0\nwindow_s = 5\n"))
        clients = [stack.enter_context(Client(path, timeout_s=600.0)) for _ in range(6)]
        item = model.items(1)[0]

        def took_ms() -> float:
            began = time.perf_counter()
            clients[0].infer("m", item)
            return 1e3 * (time.perf_counter() - began)

        took_ms()  # waits for the load
        before_ms = took_ms()
        worker = serving(state, "m")["pid"]
        before_mb = mb(worker)

        def ask_large() -> float:
            with ThreadPoolExecutor(len(clients)) as pool:
                list(pool.map(lambda client: client.infer("m", np.repeat(item, 8, axis=0)), clients * 2))
            return mb(worker)

        after_mb = ask_large()
        time.sleep(SILENT_S)
        silent_mb = mb(worker)
        first_ms = took_ms()
        ask_large()
        for client in clients:
            client.close()
        time.sleep(SILENT_S)
        left_mb = mb(worker)
        return [
            row("worker before large requests", before_mb, "MB PSS"),
            row("after them", after_mb, "MB PSS"),
            row("once the clients are silent", silent_mb, "MB PSS", before_mb + 0.7 * (after_mb - before_mb)),
            row("once all clients have left together", left_mb, "MB PSS", before_mb + 0.7 * (after_mb - before_mb)),
            row("a request before them", before_ms, "ms"),
            row("first request after the silence", first_ms, "ms"),
        ]


def learning(architecture: str) -> list[dict[str, Any]]:
    """Start a daemon that has learned nothing yet; measure the memory of all processes until it rests."""
    print(f"learning {architecture}", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgert-models-")))
        source = write_model(architecture, folder, calibration=16, holdout=16)
        model = BenchModel("m", *source, precision="fp32")
        state, _ = stack.enter_context(device_with([model], "[serving]\ncache_mb = 0\nwindow_s = 5\n"))
        edgertd(state, "stop")
        shutil.rmtree(state / "learned")
        edgertd(state, "start")
        daemon = edgertd(state, "status")["daemon"]["pid"]
        seen_mb, rests = [0.0], threading.Event()

        def watch() -> None:
            while not rests.wait(WATCH_STEP_S):
                with contextlib.suppress(OSError):  # a process has just ended
                    seen_mb.append(sum(mb(pid) for pid in processes(daemon)))

        watching = threading.Thread(target=watch)
        watching.start()
        while serving(state, "m")["state"] != "ready":
            time.sleep(WATCH_STEP_S)
        rests.set()
        watching.join()
        time.sleep(RETURN_S)
        returned_mb = sum(mb(pid) for pid in processes(daemon))
        time.sleep(2 * SILENT_S)
        steady_mb = sum(mb(pid) for pid in processes(daemon))
        weights_mb = live_artifact(state, "m").path.stat().st_size / 1e6
    return [
        row(f"{architecture}: weights", weights_mb, "MB"),
        row(f"{architecture}: peak while learning, above steady", max(seen_mb) - steady_mb, "MB PSS", weights_mb + 64),
        row(f"{architecture}: {RETURN_S:.0f} s later, above steady", returned_mb - steady_mb, "MB PSS", RETURNED_MB),
    ]


def further_workers(state: Path, times: int) -> list[dict[str, Any]]:
    """Start workers beside the serving worker. Forks and separate programs take turns."""
    print("further workers", file=sys.stderr)
    store = SlotStore(StateDir(state).models / "digits")
    slots = store.read()
    version = slots.live
    assert version is not None
    load_message = LoadMessage("digits", str(store.live_folder(slots)), version.digest, str(state), "b")
    starter = WorkerStarter()
    starts: dict[str, Callable[[socket.socket], Process]] = {"a fork": starter, "a program of its own": start_alone}
    took: dict[str, list[float]] = {how: [] for how in starts}
    for _ in range(times + 1):  # the first start is not counted, because its fork waits for the fork server
        for how, start_process in starts.items():
            began = time.monotonic()
            worker = WorkerProcess.start(load_message, version, began, start_process)
            took[how].append(ready_s(worker) - began)
    starter.close()
    return [
        row(f"a further worker, {how}, less its load", statistics.median(seen[1:]), "s", 0.1 if "fork" in how else None)
        for how, seen in took.items()
    ]


def ready_s(worker: WorkerProcess) -> float:
    """Return the time at which the worker was ready, minus the time of its load; end the worker."""
    worker.link.settimeout(START_S_MAX)
    while (received := link.receive(worker.link)) is not None:
        worker.handle_message(received[0], time.monotonic())
        if worker.loaded is not None:
            at = time.monotonic() - worker.loaded.load_s
            worker.link.close()
            worker.process.wait(START_S_MAX)
            return at
    sys.exit(f"a worker did not load: {worker.wait_for_end()}")


def idle(state: Path, path: Path, seconds: float) -> list[dict[str, Any]]:
    print(f"idle for {seconds:.0f} s", file=sys.stderr)
    supervisor = edgertd(state, "status")["daemon"]["pid"]
    with Client(path) as client:
        image = sample()
        for _ in range(200):
            client.infer("digits", image)
        time.sleep(SETTLE_S)
        pids = processes(supervisor)
        before = {pid: spent(pid) for pid in pids}
        time.sleep(seconds)
        used = {pid: tuple(b - a for a, b in zip(before[pid], spent(pid), strict=True)) for pid in pids}
    rows = []
    for pid, (cpu_s, wakes) in used.items():
        name = name_of(pid, supervisor)
        rows.append(row(f"idle, {name}: processor", 100 * cpu_s / seconds, "% of a core"))
        rows.append(row(f"idle, {name}: wake-ups", 60 * wakes / seconds, "a minute"))
    total = sum(cpu_s for cpu_s, _ in used.values())
    return [*rows, row("idle, all: processor", 100 * total / seconds, "% of a core", 0.1)]


def rounds(state: Path, count: int) -> list[dict[str, Any]]:
    """Let the device follow a channel without models, in a registry with TLS and a login."""
    print("rounds of the follower", file=sys.stderr)
    used: list[tuple[float, ...]] = []
    with RegistryServer.in_folder(state.parent / "registry", secured=True) as server:
        key = new_key()
        (state / "keys" / "rounds.pem").write_bytes(key.public.pem())
        Channels(server.registry(), (key.public,), SeenCounters(state.parent / "seen")).change(
            "stable", lambda none: none, key
        )
        lines = {"registry": server.address, "ca": server.ca, "credentials": server.login_file}
        with (state / "config.toml").open("a") as config:
            config.write("[follow]\n" + "".join(f'{name} = "{value}"\n' for name, value in lines.items()))
        for _ in range(count + 1):  # the first round is different, because it stores the statement
            words = [sys.executable, "-c", ROUND, "--state", str(state), "follow"]
            said = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]
            used.append(tuple(map(float, said.split())))
    return [
        row("a round without news: processor", statistics.median(cpu_s for cpu_s, _ in used[1:]), "s"),
        row("a round without news: memory at its end", max(kb for _, kb in used) / 1024, "MB PSS"),
    ]


def cold_start(state: Path, path: Path, starts: int) -> list[dict[str, Any]]:
    print("cold starts", file=sys.stderr)
    edgertd(state, "stop")
    engine, kept, unlearned, engine_cpu, kept_cpu = [], [], [], [], []
    for _ in range(starts):
        at = children_cpu_s()
        engine.append(import_s())
        engine_cpu.append(children_cpu_s() - at)
        at = children_cpu_s()
        kept.append(start_s(state, path))
        kept_cpu.append(children_cpu_s() - at)
        shutil.rmtree(state / "learned")
        unlearned.append(start_s(state, path))
    after = [a - b for a, b in zip(kept, engine, strict=True)]
    return [
        row("a Python that imports the engine", statistics.median(engine), "s"),
        row("a Python that imports the engine: processor", statistics.median(engine_cpu), "s"),
        row("start to first answer", statistics.median(kept), "s"),
        row("start to first answer and stop: processor, all processes", statistics.median(kept_cpu), "s"),
        row("start to first answer, nothing learned yet", statistics.median(unlearned), "s"),
        row("start to first answer, less the engine's import", statistics.median(after), "s", 1.0),
    ]


def start_s(state: Path, path: Path) -> float:
    """Start the daemon, send requests until one is answered, stop it; return the time to the answer."""
    began = time.monotonic()
    log = (state / "bench.log").open("ab")
    daemon = subprocess.Popen([sys.executable, "-m", "edgert.cli", "--state", str(state), "serve"], stderr=log)
    image = sample()
    try:
        while True:
            try:
                with Client(path) as client:
                    client.infer("digits", image)
                return time.monotonic() - began
            except Unavailable as error:
                if daemon.poll() is not None or time.monotonic() - began > START_S_MAX:
                    sys.exit(f"the daemon does not answer: {error.message}")
                time.sleep(0.002)
    finally:
        daemon.terminate()
        daemon.wait(60)
        log.close()


def import_s() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import onnxruntime"], check=True)
    return time.monotonic() - began


def ask(path: Path, times: int) -> None:
    image = sample()
    with Client(path) as client:
        for _ in range(times):
            client.infer("digits", image, cache=False)


def sample() -> Any:
    return np.ascontiguousarray(np.load(DIGITS / "holdout.npz")["image"][:1])


def mb(pid: int) -> float:
    return process_mb(pid) or 0.0


def spent(pid: int) -> tuple[float, int]:
    """Return the processor time in seconds and the wake-ups of a process so far, over all its threads."""
    cpu_ns = wakes = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread just ended
            cpu_ns += int((task / "schedstat").read_text().split()[0])
            wakes += int((task / "status").read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return cpu_ns / 1e9, wakes


def name_of(pid: int, supervisor: int) -> str:
    if pid == supervisor:
        return "supervisor"
    words = Path(f"/proc/{pid}/cmdline").read_bytes()
    return "forwarder" if b"edgert.telemetry.forwarder_process" in words else "worker"


@contextmanager
def bare(code: str, *words: str) -> Iterator[int]:
    """Run a Python with `code` until it reports ready; yield its process id."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.communicate()


@contextmanager
def broker_config() -> Iterator[str]:
    """Run a mosquitto and yield the configuration for it, or "" if none is installed."""
    if not shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"):
        print("no mosquitto is installed: idle is measured without telemetry", file=sys.stderr)
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="edgert-bench-") as folder, Broker.in_folder(Path(folder)) as broker:
        yield f'[mqtt]\nhost = "127.0.0.1"\nport = {broker.port}\n'


def row(what: str, seen: float, unit: str, target: float | None = None) -> dict[str, Any]:
    met = None if target is None else seen < target
    return {"what": what, "seen": round(seen, 3), "unit": unit, "target": target, "met": met}


if __name__ == "__main__":
    main()
