"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from edgert import Client
from edgert.bundle.signing import SigningKey, new_key
from edgert.vendor_telemetry import stop_reporting
from tests.support import devices
from tests.support.paths import DIGITS, ROOT
from tests.support.servers.brokers import Broker
from tests.support.servers.browser import Browser, chromium_path
from tests.support.servers.databases import new_database, postgres, postgres_folder
from tests.support.servers.hostile_registry import HostileRegistry, hostile_registry
from tests.support.shell import Shell, ShellHere
from tests.support.stand_ins.forked_edgertd import ForkedEdgertd, shared

# Started first, so that no long file is left when the others are done. Files that mostly wait, as with
# containers, stand between files that compute: several of them at once leave the processor idle.
LONG_FILES = (
    "hil/test_service.py",
    "hil/test_fleet.py",
    "tests/host/packager/test_zoo.py",
    "tests/host/fleet/ui/test_assets.py",
    "tests/device/versions/test_crash_points.py",
    "tests/host/cli/fleet/test_ui.py",
    "tests/host/packager/builders/test_builders.py",
    "tests/end_to_end/test_ssh.py",
    "hil/test_bootstrap.py",
    "tests/host/cli/test_build.py",
    "tests/host/fleet/store/test_gaps.py",
    "tests/host/packager/tflite_lowering/test_node_tests.py",
    "tests/host/packager/candidates/test_build_processes.py",
    "tests/host/cli/shared/test_team.py",
    "tests/end_to_end/test_trial.py",
    "hil/test_device.py",
    "tests/end_to_end/test_isolation.py",
    "tests/device/client/test_c_client.py",
    "tests/host/cli/test_deploy.py",
    "tests/end_to_end/test_full_disk.py",
    "tests/host/cli/test_bootstrap.py",
    "tests/end_to_end/test_hostile_bundles.py",
    "tests/host/packager/tflite_lowering/ops/test_ops.py",
    "tests/end_to_end/test_daemon.py",
    "tests/host/bootstrap/test_wheelhouse.py",
    "hil/test_pull.py",
    "tests/end_to_end/test_telemetry.py",
    "tests/end_to_end/test_channel_rollout.py",
    "tests/host/packager/candidates/test_choice.py",
    "hil/test_links.py",
    "tests/end_to_end/test_memory_budget.py",
    "tests/device/follow/test_follower.py",
    "tests/adversary/test_slow_clients.py",
    "tests/end_to_end/test_buckets.py",
    "tests/host/cli/fleet/test_forget.py",
    "tests/host/packager/sources/test_probe.py",
    "tests/host/rollout/test_transfer.py",
    "tests/device/worker/pipeline/test_tuning.py",
    "tests/end_to_end/test_runtime_channel.py",
    "tests/host/packager/candidates/test_mixed_precision.py",
)

# Each shim of pyenv takes a fifth of a second, and a probe of this machine tries six names of Python.
os.environ["PATH"] = os.pathsep.join(
    [f"{sys.base_prefix}/bin", *(path for path in os.environ["PATH"].split(os.pathsep) if Path(path).name != "shims")]
)
# The path of a Unix socket has 107 bytes at most, of which pytest and a test's own folders take up to 90.
TMPDIR_BYTES_MAX = 16
tmpdir_was = tempfile.gettempdir()
if len(os.fsencode(tmpdir_was)) > TMPDIR_BYTES_MAX and os.access("/tmp", os.W_OK):
    tempfile.tempdir = os.environ["TMPDIR"] = "/tmp"
# The servers of the tests are on this machine, also where a proxy leads to the internet.
if {"http_proxy", "https_proxy", "all_proxy"} & {name.lower() for name in os.environ}:
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "localhost,127.0.0.1,::1")))
# The tests start thousands of processes: each would compile every module again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# More tests run at once than there are cores: NumPy's threads would spin for their turn, twice the work.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Every run has the same examples, however busy the machine is: Hypothesis gives an example 0.2 s otherwise.
settings.register_profile(
    "edgert", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("edgert")
stop_reporting()  # before a test imports a vendor's SDK

# Each process of pytest imports all tests: the garbage collector would search them again and again. After that, tests
# that parse all files would still start it thousands of times.
gc.disable()
gc.set_threshold(50_000, 20, 100)

# A background shell starts programs that ignore Ctrl-C, and the programs of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    if tempfile.gettempdir() == tmpdir_was:
        return ""
    return f"temporary files are in /tmp: the paths of sockets below {tmpdir_was} would be too long"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {ROOT / name: place for place, name in enumerate(LONG_FILES)}
    assert [str(path) for path in order if not path.is_file()] == [], "LONG_FILES of tests/conftest.py: not there"
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def umask_restored() -> Iterator[None]:
    """Restore the umask, which `edgertd` changes if a test runs it in this process."""
    mask = os.umask(0o022)
    os.umask(mask)
    yield
    os.umask(mask)


@pytest.fixture
def hang_ups_end() -> Iterator[None]:
    """Let SIGHUP end commands, also if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def signing_key() -> SigningKey:
    return new_key()


@pytest.fixture(scope="session")
def forked_probe() -> Iterator[Any]:
    from tests.support.stand_ins.forked import Forked

    modules = ("onnx", "onnxruntime", "ai_edge_litert.interpreter")
    with Forked(*(module for module in modules if find_spec(module.partition(".")[0]))) as forked:
        yield forked


@pytest.fixture
def probes_are_forks(forked_probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examine models in forks, under a real probe's limits. A new process would import for 0.3 s."""
    from edgert_deploy.packager.sources import probe

    monkeypatch.setattr(probe, "run_in_child", forked_probe.ask)


@pytest.fixture(scope="session", autouse=True)
def forks_end_with_the_tests() -> Iterator[None]:
    yield
    if shared.cache_info().currsize:
        shared().close()


@pytest.fixture(scope="session")
def forked_edgertd() -> ForkedEdgertd:
    return shared()


@pytest.fixture
def edgertd_is_forked(forked_edgertd: ForkedEdgertd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each `edgertd` of a local device as a fork. A new process would import for a tenth of a second."""
    from edgert_deploy.devices.transports.local import LocalTransport

    run = LocalTransport.run
    monkeypatch.setattr(devices, "as_run", forked_edgertd.argv)
    monkeypatch.setattr(
        LocalTransport, "run", lambda self, argv, *given, **named: run(self, forked_edgertd.argv(argv), *given, **named)
    )


@pytest.fixture(scope="session")
def digits_source() -> Any:
    from edgert_deploy.packager.sources.source_model import load_source

    return load_source(DIGITS / "digits.onnx")


@pytest.fixture(scope="session")
def digits_calibration(digits_source: Any) -> Any:
    from edgert_deploy.packager.samples.samples import load_samples

    return load_samples(DIGITS / "calibration.npz", digits_source, at_least=10)


@pytest.fixture(scope="session")
def digits_holdout(digits_source: Any) -> Any:
    from edgert_deploy.packager.samples.samples import load_samples

    return load_samples(DIGITS / "holdout.npz", digits_source, at_least=10)


@pytest.fixture(scope="session")
def shell_with_key(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    shell = ShellHere(tmp_path_factory.mktemp("cli"))
    assert shell("keys", "new").returncode == 0
    return shell


@pytest.fixture
def shell(tmp_path: Path, shell_with_key: Shell) -> Shell:
    """Return a shell in a new folder; all these shells share one signing key."""
    fresh = Shell(tmp_path)
    fresh.env["EDGERT_CONFIG_DIR"] = shell_with_key.env["EDGERT_CONFIG_DIR"]
    return fresh


@pytest.fixture
def shell_here(tmp_path: Path, shell_with_key: Shell) -> ShellHere:
    """Return a shell like `shell` that runs the commands in this process."""
    here = ShellHere(tmp_path)
    here.env["EDGERT_CONFIG_DIR"] = shell_with_key.env["EDGERT_CONFIG_DIR"]
    return here


@pytest.fixture
def client(device: devices.Device) -> Iterator[Client]:
    """Return a connected client of the test file's own `device`."""
    with device.client() as client:
        yield client


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.in_folder(tmp_path / "broker") as running:
        yield running


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Return a broker with TLS, a user and a password."""
    with Broker.in_folder(tmp_path_factory.mktemp("secured"), secured=True) as running:
        yield running


@pytest.fixture
def registry() -> Iterator[HostileRegistry]:
    """Return a registry that answers as the test wants."""
    with hostile_registry() as running:
        yield running


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return an `SshDevice`."""
    from hil.support.sshd import running_sshd

    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    if postgres_folder() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty store, for each supported database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/fleet.db"
    return new_database(request.getfixturevalue("postgres_server"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start a Chromium for one module's tests; Playwright keeps an event loop here until the end."""
    if chromium_path() is None:
        pytest.skip("no Chromium is installed: apt-get install chromium-headless-shell")
    pytest.importorskip("playwright")
    chromium = Browser.start()
    yield chromium
    chromium.close()
