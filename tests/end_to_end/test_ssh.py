"""All steps over a real sshd: bare device, bootstrap, deploy, answers, a new version, rollback, and every refusal.

The real command builds the real model. A device that refuses a bundle keeps serving the live version.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert import Client, EdgeRTError
from edgert.bundle.signing import new_key, read_signing_key
from edgert.typed_json import to_json
from edgert_deploy.common.folders import cache_folder
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.remote_daemon import RemoteDaemon
from edgert_deploy.devices.transports import open_transport
from hil.support.sshd import SshDevice, running_sshd
from tests.support.bundles import flip_bit, make_null_bundle
from tests.support.clients import PAUSE_S
from tests.support.devices import WAIT_S_MAX
from tests.support.models.intents import sentences, write_model, write_sentences
from tests.support.paths import ROOT
from tests.support.shell import edgert_apart, edgert_here, environment_of
from tests.support.trees import another_tree

DIGITS = ROOT / "examples" / "digits"
COMMAND_S_MAX = 280
# The device is this machine: leave no unit in its systemd.
MONITOR = ("--service", "monitor", "--engines", "first")


@dataclass
class World:
    """One host with its configuration, and one device behind a real sshd.

    With `apart`, each command runs in a process of its own, for commands that run at the same time.
    """

    folder: Path
    sshd: SshDevice
    apart: bool = False

    def __post_init__(self) -> None:
        """Use the wheels that other tests collected; `test_wheelhouse.py` tests the collection itself."""
        own, shared = self.folder / "cache" / "edgert", cache_folder() / "wheels"
        shared.mkdir(parents=True, exist_ok=True)
        own.mkdir(parents=True)
        (own / "wheels").symlink_to(shared)

    @property
    def inventory(self) -> Inventory:
        return Inventory(self.folder / "conf" / "inventory.toml")

    @property
    def socket(self) -> Path:
        return self.sshd.state / "edgert.sock"

    def edgert(self, *words: object, tree: Path = ROOT) -> tuple[int, dict[str, Any]]:
        """Run `edgert WORDS --json` of a source tree; return exit code and output."""
        given = [*map(str, words), "--json"]
        variables = {"EDGERT_CONFIG_DIR": str(self.folder / "conf"), "XDG_CACHE_HOME": str(self.folder / "cache")}
        if tree == ROOT and not self.apart:
            done = edgert_here(given, self.folder, **variables)
        else:
            done = edgert_apart(given, self.folder, environment_of(tree, **variables), COMMAND_S_MAX)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def build(self, release: int) -> Path:
        out = self.folder / f"digits-{release}.edgert"
        if not out.exists():
            samples = ("--calibration", DIGITS / "calibration.npz", "--holdout", DIGITS / "holdout.npz")
            words = (DIGITS / "digits.onnx", *samples, "--target", "this-machine", "--profiles", ROOT / "devices")
            code, answer = self.edgert("build", *words, "--release", release, "--out", out)
            assert code == 0, answer
        return out

    def deploy(self, bundle: Path, to: str = "board") -> tuple[int, dict[str, Any]]:
        return self.edgert("deploy", bundle, to)

    def daemon(self) -> RemoteDaemon:
        device = self.inventory.device("board")
        return RemoteDaemon(open_transport(device), device)

    def live(self) -> dict[str, Any]:
        """Return the status of the slots of `digits`."""
        daemon = self.daemon()
        try:
            digits = daemon.status().model("digits")
            assert digits is not None
            return dict(to_json(digits))
        finally:
            daemon.transport.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Add and bootstrap a bare device over SSH."""
    with running_sshd(tmp_path_factory.mktemp("e2e")) as sshd:
        made = World(tmp_path_factory.mktemp("host"), sshd)
        assert made.edgert("keys", "new")[0] == 0
        words = ("device", "add", "board", sshd.address, "--identity", sshd.client_key, "--profile", "this-machine")
        where = ("--state", sshd.state, "--home", sshd.home / "edgert", "--fingerprint", sshd.fingerprint)
        code, added = made.edgert(*words, *where)
        assert code == 0, added
        code, refused = made.deploy(made.build(1))
        assert (code, refused["error"]["code"]) == (7, "device.not_bootstrapped")
        try:
            code, ready = made.edgert("bootstrap", "board", *MONITOR)
            assert code == 0, ready
            assert ready["devices"][0]["changed"][0] == "environment"
            yield made
        finally:
            made.daemon().call("stop")


@pytest.fixture
def serving(world: World) -> World:
    """A device with release 2 of the real model live."""
    code, answer = world.deploy(world.build(2))
    assert code == 0, answer
    assert world.live()["live"]["release"] == 2
    return world


def accuracy(world: World) -> float:
    with np.load(DIGITS / "holdout.npz") as samples, Client(world.socket) as client:
        images, labels = samples["image"], samples["labels"]
        (scores,) = client.infer("digits", images).values()
        return float((scores.argmax(axis=-1) == labels).mean())


def test_a_second_bootstrap_changes_nothing(world: World) -> None:
    pid = world.daemon().status().daemon.pid
    code, again = world.edgert("bootstrap", "board", *MONITOR)
    assert (code, again["devices"][0]["changed"]) == (0, [])
    daemon = again["devices"][0]["status"]["daemon"]
    assert (daemon["running"], daemon["pid"]) == (True, pid)
    assert again["devices"][0]["status"]["engines"]["onnxruntime"]


def test_an_environment_has_only_the_byte_code_that_a_device_runs(world: World) -> None:
    """The daemon writes no byte code, so without it each of its processes would compile all modules again."""
    (site,) = (world.sshd.home / "edgert/venv").glob("lib/python*/site-packages")
    compiled = {path.relative_to(site).parts[0] for path in site.rglob("*.pyc")}
    assert {"PIL", "cryptography", "edgert", "numpy", "onnxruntime"} <= compiled
    assert not {"edgert_deploy", "pip"} & compiled
    assert not list(site.glob("numpy/**/tests/__pycache__"))
    modules = [path for path in site.glob("edgert/**/*.py") if path.name != "__main__.py"]
    assert [path for path in modules if not list(path.parent.glob(f"__pycache__/{path.stem}.*.pyc"))] == []


def test_two_hosts_that_bootstrap_one_device_at_once_do_not_interfere(tmp_path: Path) -> None:
    """Without a claim, each host would empty the environment that the other host fills."""
    with running_sshd(tmp_path / "sshd") as sshd:
        hosts = [World(tmp_path / name, sshd, apart=True) for name in ("one", "two")]
        for host in hosts:
            host.inventory.add(sshd.device())
            assert host.edgert("keys", "new")[0] == 0
        words = ("bootstrap", "board", "--service", "monitor", "--engines", "null")
        try:
            with ThreadPoolExecutor() as pool:
                ends = list(pool.map(lambda host: host.edgert(*words), hosts))
            assert 0 in [code for code, _ in ends], ends
            assert {answer["error"]["code"] for code, answer in ends if code != 0} <= {"device.deploy_under_way"}
            late = hosts[[code for code, _ in ends].index(0)]
            code, again = late.edgert(*words)
            assert (code, again["devices"][0]["changed"]) == (0, [])
        finally:
            hosts[0].daemon().call("stop")


def test_a_device_is_deployed_to_and_answers_and_swaps_under_load_and_rolls_back(world: World) -> None:
    code, first = world.deploy(world.build(1))
    assert (code, first["devices"][0]["result"], first["devices"][0]["serving"]) == (0, "live", 1)
    assert accuracy(world) >= 0.97

    np.save(world.folder / "images.npy", np.load(DIGITS / "holdout.npz")["image"][:3])
    for where in (("--socket", world.socket), ("board",)):
        code, answer = world.edgert("infer", "digits", "--input", world.folder / "images.npy", *where)
        assert code == 0, answer
        assert next(iter(answer["outputs"].values()))["shape"] == [3, 10]

    second = world.build(2)
    with Load(world.socket) as load:
        code, swapped = world.deploy(second)
        assert (code, swapped["devices"][0]["result"]) == (0, "live")
        load.wait_for_release(2)
    assert load.failures == []
    assert load.releases == {1, 2}

    code, back = world.edgert("rollback", "digits", "board")
    assert (code, back["devices"]) == (0, [{"device": "board", "was": 2, "release": 1}])
    assert world.live()["live"]["release"] == 1
    assert accuracy(world) >= 0.97
    code, asked = world.edgert("status", "board")
    assert (code, asked["devices"][0]["status"]["models"][0]["serving"]["state"]) == (0, "ready")


def test_the_old_environment_is_kept_if_an_engine_of_the_new_one_does_not_load(serving: World) -> None:
    venv = serving.sshd.home / "edgert" / "venv"
    before = venv.resolve()
    code, answer = serving.edgert("bootstrap", "board", *MONITOR[:2], "--engines", "tensorrt")
    assert (code, answer["error"]["code"]) == (7, "device.engine_missing"), answer
    assert venv.resolve() == before
    assert list((serving.sshd.home / "edgert" / "venvs").iterdir()) == [before]
    assert_serves_on(serving)


def test_a_device_with_a_monitor_tries_a_new_runtime(serving: World) -> None:
    newer, venv = another_tree(serving.folder / "newer"), serving.sshd.home / "edgert" / "venv"
    before = venv.resolve()
    code, done = serving.edgert("bootstrap", "board", *MONITOR, "--upgrade", tree=newer)
    assert (code, done["devices"][0]["changed"]) == (0, ["runtime"]), done
    assert venv.resolve() == before.with_name(done["devices"][0]["runtime"]["id"]) != before
    assert_serves_on(serving)
    code, back = serving.edgert("bootstrap", "board", *MONITOR, "--previous-runtime")
    assert (code, venv.resolve()) == (0, before), back
    assert_serves_on(serving)


def test_a_flipped_bit_is_refused_on_the_host_and_on_the_device(serving: World) -> None:
    flipped = flip_bit(serving.build(3), -5000)
    code, answer = serving.deploy(flipped)
    assert (code, answer["error"]["code"]) == (5, "bundle.corrupt")
    assert refused_there(serving, flipped) == "bundle.corrupt"
    assert_serves_on(serving)


def test_an_older_release_is_refused_on_the_host_and_on_the_device(serving: World) -> None:
    older = serving.build(1)
    code, answer = serving.deploy(older)
    assert (code, answer["error"]["code"]) == (5, "bundle.release_too_old")
    assert refused_there(serving, older) == "bundle.release_too_old"
    assert_serves_on(serving)


def test_a_wrong_key_is_refused_on_the_host_and_on_the_device(serving: World) -> None:
    foreign = make_null_bundle(serving.folder / "foreign", new_key(), model="digits", release=9)
    code, answer = serving.deploy(foreign)
    assert (code, answer["error"]["code"]) == (5, "bundle.signature_invalid")
    assert refused_there(serving, foreign) == "bundle.signature_invalid"
    assert_serves_on(serving)


def test_another_profile_is_refused_on_the_host_and_on_the_device(serving: World) -> None:
    other = make_null_bundle(serving.folder / "other", the_key(serving), "digits", 9, "jetson-orin-nano")
    code, answer = serving.deploy(other)
    assert (code, answer["error"]["code"]) == (5, "bundle.not_compatible")
    assert refused_there(serving, other) == "bundle.not_compatible"
    assert_serves_on(serving)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"golden_off_by": 1.0}, "device.health_check_failed"),
        ({"program": b"?"}, "device.engine_failed"),
        ({"program": b"?", "engine": "onnxruntime"}, "device.engine_failed"),
    ],
)
def test_a_broken_model_is_rolled_back(serving: World, fault: dict[str, Any], reason: str) -> None:
    broken = make_null_bundle(serving.folder / "broken", the_key(serving), model="digits", release=9, **fault)
    with Load(serving.socket) as load:
        code, answer = serving.deploy(broken)
    error = answer["error"]
    if error["code"] == "deploy.rolled_back":
        assert code == 9
        assert answer["devices"][0]["serving"] == 2
        assert f"[{reason}]" in error["message"]
    else:  # an engine that compiles during the install refuses the model before the switch
        assert (code, error["code"]) == (7, reason)
    assert load.failures == []
    assert load.releases == {2}
    assert_serves_on(serving)


def test_a_changed_host_key_is_refused_before_anything_is_sent(
    serving: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with running_sshd(tmp_path_factory.mktemp("impostor")) as impostor:
        board = serving.inventory.device("board")
        there = {"name": "moved", "address": impostor.address, "same_machine": True}
        serving.inventory.add(Device(**{**vars(board), **there}))
        try:
            code, answer = serving.deploy(serving.build(3), "moved")
            assert (code, answer["error"]["code"]) == (6, "device.host_key_mismatch")
            assert "Accepted" not in impostor.log
            assert not impostor.state.exists()
            # A refused device does not delay the others.
            code, both = serving.deploy(serving.build(2), "all")
            assert code == 6, both
            assert {d["device"]: d["result"] for d in both["devices"]} == {"board": "unchanged", "moved": "failed"}
        finally:
            serving.inventory.remove("moved")
    assert_serves_on(serving)


def the_key(world: World) -> Any:
    return read_signing_key(world.folder / "conf" / "keys" / "default.key.pem")


def refused_there(world: World, bundle: Path) -> str:
    """Return the error code with which the device itself refuses the bundle, without the host's checks."""
    daemon = world.daemon()
    remote = f"{world.sshd.state}/incoming/{bundle.name}"
    try:
        daemon.transport.put(bundle, remote)
        with pytest.raises(EdgeRTError) as caught:
            daemon.call("install", remote)
        return caught.value.code
    finally:
        daemon.transport.run(["rm", "-f", remote], 30)
        daemon.transport.close()


def assert_serves_on(world: World) -> None:
    digits = world.live()
    assert (digits["live"]["release"], digits["live"]["good"], digits["state"]) == (2, True, "steady")
    assert accuracy(world) >= 0.97
    assert list((world.sshd.state / "incoming").iterdir()) == []


class Load:
    """Threads that send requests without a pause, and record every failure and every release that answered."""

    def __init__(self, socket: Path, threads: int = 3) -> None:
        self.failures: list[str] = []
        self.releases: set[int] = set()
        self._stop, self._changed = threading.Event(), threading.Condition()
        self._client = Client(socket)
        self._images = np.load(DIGITS / "holdout.npz")["image"]
        self._threads = [threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S_MAX)
        self._client.close()

    def wait_for_release(self, release: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: release in self.releases or self.failures, WAIT_S_MAX)

    def _ask(self, number: int) -> None:
        turn = number
        while not self._stop.wait(PAUSE_S):
            turn = (turn + 1) % len(self._images)
            try:
                answer = self._client.infer("digits", self._images[turn : turn + 1], trace=True)
            except EdgeRTError as error:
                self.failures.append(f"{error.code}: {error.message}")
                continue
            with self._changed:
                self.releases.add(answer.release)
                self._changed.notify_all()


def test_a_device_accepts_a_model_of_text_once_it_has_tokenizers(serving: World) -> None:
    pytest.importorskip("tokenizers")
    folder, rows = serving.folder / "text", sentences(190, 7)
    folder.mkdir()
    write_model(folder)
    (folder / "text.toml").write_text('[text]\ntokenizer = "tokenizer.json"\n')
    calibration = write_sentences(folder / "calibration", rows[:60])
    holdout = write_sentences(folder / "holdout", rows[60:160])
    samples = ("--calibration", calibration, "--holdout", holdout)
    words = (folder / "intents.onnx", *samples, "--target", "this-machine", "--profiles", ROOT / "devices")
    rules = ("--preprocess", folder / "text.toml", "--labels", folder / "labels.txt", "--buckets", "tokens=8,16")
    quick = ("--engines", "first", "--precision", "fp32")  # test_text.py has INT8 in each engine
    code, built = serving.edgert("build", *words, *rules, *quick, "--out", folder / "intents.edgert")
    assert code == 0, built
    code, refused = serving.deploy(folder / "intents.edgert")
    assert (code, refused["error"]["code"]) == (7, "device.engine_missing"), refused
    assert "edgert bootstrap board --with text" in refused["error"]["message"]
    code, done = serving.edgert("bootstrap", "board", *MONITOR, "--with", "text")
    assert (code, done["devices"][0]["changed"]) == (0, ["runtime"]), done
    code, deployed = serving.deploy(folder / "intents.edgert")
    assert code == 0, deployed
    text, label = rows[160]
    code, answer = serving.edgert("infer", "intents", "board", "--text", text)
    assert (code, answer["outputs"]["scores_classes"]["values"]) == (0, [label]), answer
    names = (folder / "labels.txt").read_text().splitlines()
    assert answer["outputs"]["scores_classes"]["labels"] == [names[label]]
    code, again = serving.edgert("bootstrap", "board", *MONITOR)  # the device keeps its extras
    assert (code, again["devices"][0]["changed"]) == (0, []), again
