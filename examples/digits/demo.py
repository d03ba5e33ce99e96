"""The demo: build, deploy, serve and watch, with the commands that a user would type.

`make demo` runs it on a folder of this machine, `make demo DEVICE=ssh` over a real sshd on loopback. With `DEVICE=pull`
the device follows a channel in a real registry on loopback.
Everything is in one temporary folder, which is removed at the end; nothing is left running.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from edgert import Client
from edgert.errors import EdgeRTError
from edgert.tensors import InferResponse
from hil.support.sshd import running_sshd

HERE = Path(__file__).resolve().parent
CONNECTIONS = 8
WINDOW_S = 2
ASKS_EVERY_S, WATCH_S, KEPT_WITHIN_S = 2, 5, 120
REGISTRY = """\
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""
BOLD, DIM, END = ("\033[1m", "\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ssh", action="store_true", help="deploy over a real sshd on loopback, with a real mosquitto")
    parser.add_argument("--pull", action="store_true", help="the device fetches the bundle from a real registry")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="edgert-demo-"))
    try:
        Demo(folder, options.ssh, options.pull).run()
    except DemoFailed as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(
        f"\nDone in {time.monotonic() - began:.0f} s; nothing is left running. {NEXT.format(venv=shlex.quote(os.path.relpath(sys.prefix)))}"
    )
    return 0


NEXT = """Try it by hand:
  source {venv}/bin/activate
  edgert keys new                                    # once
  edgert build --init your.onnx                      # writes your.toml: edit it
  edgert build your.toml
  edgert device add here --local ./device
  edgert deploy your.edgert here
  edgert infer your here --input sample.npy
  edgertd --state ./device stop
The tour in README.md explains each command."""


class DemoFailed(Exception):
    """A step of the demo failed; the message names the step and the cause."""


class Demo:
    """The steps of the demo, in order. `folder` holds keys, inventory, bundle and device."""

    def __init__(self, folder: Path, over_ssh: bool, pull: bool = False) -> None:
        self._folder, self._over_ssh, self._pull = folder, over_ssh, pull
        self._bundle = folder / "digits.edgert"
        self._state = folder / "device"
        self._environment = {**os.environ, "EDGERT_CONFIG_DIR": os.fspath(folder / "config")}

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            self._title("1. A key to sign bundles with")
            self._edgert("keys", "new")
            self._title("2. One ONNX model, an INT8 artifact for each kind of device, each checked on the hold-out")
            self._edgert("build", HERE / "digits.toml", "--out", self._bundle)
            self._title("3. A device" + (" behind a real sshd" if self._over_ssh else ": a folder on this machine"))
            broker = stack.enter_context(self._broker())
            stack.callback(self._stop_device)
            self._add_device(stack)
            window = f"serving.window_s={WINDOW_S}.0"
            registry = stack.enter_context(self._registry()) if self._pull else ""
            follow = ["--follow", registry, "--set", f"follow.interval_s={ASKS_EVERY_S}"] if self._pull else []
            given = ["--broker", broker, "--service", "monitor", "--engines", "first", "--set", window]
            self._edgert("bootstrap", "here", *given, *follow)
            if self._pull:
                offer = ("--registry", registry, "--channel", "stable", "--watch", f"{WATCH_S}s")
                self._edgert("publish", self._bundle, *offer)
                self._wait_until_kept()
                self._edgert("channel", "show", "stable", "--registry", registry)
            else:
                self._edgert("deploy", self._bundle, "here")
            self._title(f"4. {CONNECTIONS} apps send requests at once, every image twice")
            client = stack.enter_context(Client(self._state / "edgert.sock"))
            self._send_holdout(client)
            self._title("5. The fleet's table in the terminal, while the apps send requests")
            with self._sending(client):
                self._edgert("fleet", "watch", "--broker", broker, "--once", "--for", f"{4 * WINDOW_S:g}s")
            self._edgert("status", "here")

    def _add_device(self, stack: contextlib.ExitStack) -> None:
        if not self._over_ssh:
            self._edgert("device", "add", "here", "--local", self._state, "--profile", "this-machine")
            return
        try:
            sshd = stack.enter_context(running_sshd(self._folder / "sshd"))
        except EdgeRTError as error:
            raise DemoFailed(error.message) from error
        self._edgert(
            "device", "add", "here", sshd.address, "--fingerprint", sshd.fingerprint, "--identity", sshd.client_key,
            "--home", self._folder / "home", "--state", self._state, "--profile", "this-machine",
        )  # fmt: skip

    def _send_holdout(self, client: Client) -> None:
        """Send the hold-out twice from several connections and print the results."""
        holdout = np.load(HERE / "holdout.npz")
        images = holdout["image"]
        times_ms: list[float] = []

        def ask(i: int) -> InferResponse:
            began = time.perf_counter()
            response = client.infer("digits", images[i], trace=True)
            times_ms.append((time.perf_counter() - began) * 1e3)
            return response

        try:
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                responses = list(pool.map(ask, [*range(len(images)), *range(len(images))]))
        except EdgeRTError as error:
            raise DemoFailed(error.message) from error
        self._print_results(responses, np.tile(holdout["labels"], 2), times_ms)

    @contextlib.contextmanager
    def _sending(self, client: Client) -> Iterator[None]:
        """Send requests until the block ends; half of the images were never sent before."""
        images = np.load(HERE / "holdout.npz")["image"]
        done = threading.Event()

        def ask(number: int) -> None:
            random = np.random.default_rng(number)
            while not done.wait(0.002):
                seen = images[random.integers(len(images))]
                noise = random.normal(0, 0.02, seen.shape).astype(np.float32) if random.random() < 0.5 else 0
                with contextlib.suppress(EdgeRTError):
                    client.infer("digits", seen + noise)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(CONNECTIONS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            done.set()
            for thread in threads:
                thread.join()

    def _print_results(self, responses: list[InferResponse], labels: Any, times_ms: list[float]) -> None:
        right = np.mean([r.outputs["scores"].argmax() == label for r, label in zip(responses, labels, strict=True)])
        computed = [r for r in responses if not r.cache_hit]
        batches = Counter(r.batch for r in computed)
        print(f"  accuracy     {right:.2%} of {len(responses)} answers, INT8, over the socket")
        print(
            f"  latency      p50 {np.percentile(times_ms, 50):.3f} ms, p99 {np.percentile(times_ms, 99):.3f} ms, measured by the apps"
        )
        print("  batch sizes  " + ", ".join(f"{size}: {count} answers" for size, count in sorted(batches.items())))
        print(f"  cache        {sum(r.cache_hit for r in responses)} of {len(responses)} answered from the cache")
        stages = {name: np.median([getattr(r.stages, name) for r in computed]) for name in computed[0].stages._fields}
        print(
            "  stages       " + ", ".join(f"{name[:-3]} {value:.0f}" for name, value in stages.items()) + " us (median)"
        )

    @contextlib.contextmanager
    def _broker(self) -> Iterator[str]:
        """Run a broker on a free loopback port: mosquitto with `--ssh`, else amqtt."""
        port = free_port()
        if self._over_ssh:
            path = shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
            if path is None:
                raise DemoFailed("mosquitto is not installed; install it with: sudo apt-get install mosquitto")
            command = [path, "-p", str(port)]
        else:
            command = [sys.executable, "-m", "examples.digits.broker", str(port)]
        broker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=HERE.parent.parent)
        try:
            wait_for_port(port)
            yield f"127.0.0.1:{port}"
        finally:
            broker.terminate()
            broker.wait(10)

    @contextlib.contextmanager
    def _registry(self) -> Iterator[str]:
        """Run Debian's docker-registry on a free loopback port, without TLS; yield a repository's address."""
        port, program = free_port(), shutil.which("docker-registry")
        if program is None:
            raise DemoFailed("docker-registry is not installed; install it with: sudo apt-get install docker-registry")
        configuration = self._folder / "registry.yml"
        configuration.write_text(REGISTRY.format(folder=self._folder / "registry", port=port))
        registry = subprocess.Popen(
            [program, "serve", os.fspath(configuration)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_for_port(port)
            yield f"oci+http://127.0.0.1:{port}/demo/models"
        finally:
            registry.terminate()
            registry.wait(10)

    def _wait_until_kept(self) -> None:
        """Wait until the device has fetched the bundle, tried it and marked it good by itself."""
        command = [sys.executable, "-m", "edgert.cli", "--state", os.fspath(self._state), "status", "--json"]
        shown, until = "", time.monotonic() + KEPT_WITHIN_S
        while time.monotonic() < until:
            said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            states = [
                f"release {model['live']['release']} is {model['state']}" for model in said["models"] if model["live"]
            ]
            if states and states[0] != shown:
                shown = states[0]
                print(f"  device       {shown}", flush=True)
            if shown.endswith("steady"):
                return
            time.sleep(0.5)
        raise DemoFailed(f"the device did not keep the bundle within {KEPT_WITHIN_S} s: {said.get('channel')}")

    def _stop_device(self) -> None:
        if (self._state / "config.toml").exists():
            command = [sys.executable, "-m", "edgert.cli", "--state", os.fspath(self._state), "stop"]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=False)

    def _edgert(self, *words: object) -> None:
        """Print an `edgert` command, then run it."""
        texts = [os.fspath(word) if isinstance(word, Path) else str(word) for word in words]
        print(f"\n{BOLD}$ edgert {shlex.join(self._short(text) for text in texts)}{END}", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "edgert_deploy.cli", *texts], env=self._environment, cwd=self._folder
        )
        if done.returncode:
            raise DemoFailed(f"edgert {texts[0]} ended with exit code {done.returncode}; its message is above")

    def _short(self, text: str) -> str:
        """Return a path as a user would type it from the top folder."""
        return text.replace(f"{HERE}/", "examples/digits/").replace(f"{self._folder}/", "")

    def _title(self, text: str) -> None:
        print(f"\n{BOLD}{text}{END}", flush=True)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for_port(port: int) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise DemoFailed(f"nothing listens on port {port}")


if __name__ == "__main__":
    sys.exit(main())
