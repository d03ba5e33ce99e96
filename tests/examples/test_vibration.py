"""The vibration example through build and a real daemon, for each engine: raw values in, the machine's state out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert import Client
from edgert.errors import RequestError
from examples.vibration.make import LABELS, recordings
from tests.support.devices import Device
from tests.support.examples import ENGINES, Built, built, served
from tests.support.paths import ROOT
from tests.support.shell import Shell, ShellHere

EXAMPLE = ROOT / "examples/vibration"


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    shell = ShellHere(tmp_path_factory.mktemp("vibration"))
    made = subprocess.run(
        [sys.executable, EXAMPLE / "make.py", shell.folder], capture_output=True, text=True, env=shell.env
    )
    assert made.returncode == 0, made.stdout + made.stderr
    for file in EXAMPLE.glob("*.toml"):
        shutil.copy(file, shell.folder)
    return shell


@pytest.fixture(scope="module")
def bundle(shell: Shell) -> Built:
    return built(shell, "vibration", ENGINES, "vibration.toml")


@pytest.fixture(scope="module", params=ENGINES)
def device(request: pytest.FixtureRequest, bundle: Built) -> Iterator[Device]:
    row = bundle.targets[request.param]
    assert (row["precision"], row["fp32"]) == ("int8", 1.0)
    assert row["artifact_accuracy"] >= 0.99
    with served(bundle, request.param) as device:
        yield device


def states(client: Client, signals: NDArray[np.generic]) -> list[str]:
    names = client.labels("vibration")
    return [names[i] for i in client.infer("vibration", signals)["scores_classes"].ravel()]


def test_raw_values_give_the_state_of_the_machine(client: Client) -> None:
    signals, labels = recordings(np.random.default_rng(99), 3)
    assert states(client, signals) == [LABELS[label] for label in labels]
    assert states(client, signals[0]) == [LABELS[0]]  # without a batch axis, as an app sends it
    gap = signals[-1].copy()
    gap[100:110, 1] = np.nan
    assert states(client, gap) == [LABELS[-1]]
    answer = client.infer("vibration", signals[:1] + 0.001, trace=True)
    assert answer.stages.preprocess_us > 0


def test_the_app_names_the_state_of_each_file(device: Device, shell: Shell) -> None:
    files = [next((shell.folder / "holdout" / label).iterdir()) for label in LABELS]
    done = subprocess.run(
        [sys.executable, EXAMPLE / "app.py", *files],
        capture_output=True,
        text=True,
        env={**os.environ, "EDGERT_SOCKET": str(device.socket)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == list(LABELS)


@pytest.mark.parametrize("example", ["vibration/app.py", "keyword/app.py", "embeddings/search.py"])
def test_an_app_without_a_daemon_ends_with_one_line(example: str, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("a text\n")
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / example, tmp_path / "texts", "a text"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "EDGERT_SOCKET": str(tmp_path / "none.sock")},
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert done.stderr.startswith("no daemon listens at")


def test_the_app_ends_quietly_when_its_reader_has_ended(device: Device, shell: Shell) -> None:
    unread, pipe = os.pipe()
    os.close(unread)
    done = subprocess.run(
        [sys.executable, EXAMPLE / "app.py", next((shell.folder / "holdout" / LABELS[0]).iterdir())],
        stdout=pipe,
        stderr=subprocess.PIPE,
        env={**os.environ, "EDGERT_SOCKET": str(device.socket)},
        timeout=300,
    )
    os.close(pipe)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_signal_of_another_form_is_refused(client: Client) -> None:
    with pytest.raises(RequestError, match="has 1000 values per channel, and a window has 1024"):
        client.infer("vibration", np.zeros((1000, 3), np.float32))
    with pytest.raises(RequestError, match=r"takes FP32 \[-1, 3, 17\] or FP32 \[-1, -1, 3\] or INT16 \[-1, -1, 3\]"):
        client.infer("vibration", np.zeros((1024, 2), np.float32))
