"""The keyword example through build and a real daemon, for each engine: WAV files in, keywords out."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert import Client
from edgert.processing.signals.wav import read_wav
from tests.support.devices import Device
from tests.support.examples import ENGINES, Built, built, served
from tests.support.paths import ROOT
from tests.support.shell import ShellHere

EXAMPLE = ROOT / "examples/keyword"
COMMANDS = EXAMPLE / "commands.wav"
SPOKEN = ["start", "louder"]  # and a word that is no command between them


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return built(ShellHere(tmp_path_factory.mktemp("keyword")), "keyword", ENGINES, str(EXAMPLE / "keyword.toml"))


@pytest.fixture(scope="module", params=ENGINES)
def device(request: pytest.FixtureRequest, bundle: Built) -> Iterator[Device]:
    row = bundle.targets[request.param]
    assert (row["precision"], row["metric"], row["passed"]) == ("int8", "event_f1", True)
    assert row["fp32"] > 0.95
    with served(bundle, request.param) as device:
        yield device


def answered(client: Client, sound: bytes | NDArray[np.float32]) -> list[str]:
    """Return the words that an app hears: each run of a class is one."""
    names = client.labels("keyword")
    classes = [int(c) for c in client.infer("keyword", sound)["scores_classes"].ravel()]
    runs = [classes[0], *(b for a, b in itertools.pairwise(classes) if a != b)]
    return [names[c] for c in runs if c >= 0]


def test_a_wav_file_of_words_gives_its_commands(device: Device) -> None:
    with device.client() as client:
        assert answered(client, COMMANDS.read_bytes()) == SPOKEN
        samples, rate_hz = read_wav(COMMANDS.read_bytes())
        assert rate_hz == 8000
        assert answered(client, samples) == SPOKEN


def test_neither_silence_nor_noise_is_answered_as_a_command(device: Device) -> None:
    noise = np.random.default_rng(3).normal(0, 0.02, 5 * 8000).astype(np.float32)
    with device.client() as client:
        assert answered(client, noise) == []
        answer = client.infer("keyword", np.zeros(8000, np.float32), trace=True)
        assert answer.outputs["scores_classes"].ravel().tolist() == [-1]
        assert answer.outputs["scores_probabilities"].ravel().tolist() == [0.0]
        assert answer.stages.preprocess_us > 0
        assert answer.stages.postprocess_us > 0


def test_the_app_prints_the_commands_of_a_stream(device: Device) -> None:
    samples, _ = read_wav(COMMANDS.read_bytes())
    done = subprocess.run(
        [sys.executable, EXAMPLE / "app.py"],
        input=(samples * 32767).astype(np.int16).tobytes(),
        capture_output=True,
        env={**os.environ, "EDGERT_SOCKET": str(device.socket)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split() == SPOKEN
