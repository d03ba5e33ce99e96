"""A recurrent model with state, from `edgert build` to sessions on a device, on each engine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert import Client
from tests.support.devices import Device
from tests.support.examples import ENGINES, Built, built, served
from tests.support.models.bursts import CHUNK, RULES, answers, frames, recording, write_model, write_recordings
from tests.support.profiles import ONE_ENGINE
from tests.support.shell import Shell, ShellHere


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    shell = ShellHere(tmp_path_factory.mktemp("bursts"))
    assert shell("keys", "new", "--dir", "keys").returncode == 0
    write_model(shell.folder / "bursts.onnx")
    write_recordings(shell.folder / "calibration", range(4))
    write_recordings(shell.folder / "holdout", range(100, 106))
    (shell.folder / "rules.toml").write_text(RULES)
    (shell.folder / "labels.txt").write_text("quiet\nburst\n")
    (shell.folder / "profiles").mkdir()
    return shell


@pytest.fixture(scope="module")
def bundle(shell: Shell) -> Built:
    rules = ("--preprocess", "rules.toml", "--labels", "labels.txt", "--precision", "fp32")
    return built(
        shell, "bursts", ENGINES, "bursts.onnx", *rules, "--calibration", "calibration", "--holdout", "holdout"
    )


@pytest.fixture(scope="module", params=ENGINES)
def device(request: pytest.FixtureRequest, bundle: Built) -> Iterator[Device]:
    with served(bundle, request.param) as device:
        yield device


@pytest.mark.parametrize("size", [CHUNK, 5, 100])
def test_chunks_of_any_length_give_the_models_own_answers(device: Device, shell: Shell, size: int) -> None:
    signal, _ = recording(200)
    want, _ = answers(shell.folder / "bursts.onnx", signal)
    with device.client() as client, client.session("bursts") as stream:
        got = [stream.infer(signal[at : at + size])["scores"] for at in range(0, len(signal), size)]
    np.testing.assert_allclose(np.concatenate(got), want, atol=1e-3)


def test_simultaneous_sessions_give_the_same_answers_as_a_single_session(device: Device, shell: Shell) -> None:
    def ask(seed: int) -> None:
        signal, _ = recording(seed, chunks=30)
        with device.client() as client, client.session("bursts") as stream:
            got = [stream.infer(signal[at : at + CHUNK])["scores"] for at in range(0, len(signal), CHUNK)]
        np.testing.assert_allclose(np.concatenate(got), answers(shell.folder / "bursts.onnx", signal)[0], atol=1e-3)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(300, 306)))


def test_a_whole_recording_in_one_request_is_answered_like_a_session(device: Device, shell: Shell) -> None:
    signal, lasting = recording(201)
    with device.client() as client:
        answer = client.infer("bursts", signal)
        names = client.labels("bursts")
    np.testing.assert_allclose(answer["scores"], answers(shell.folder / "bursts.onnx", signal)[0], atol=1e-3)
    assert [names[i] == "burst" for i in answer["scores_classes"][:, 0]] == lasting.astype(bool).tolist()


def test_samples_of_a_stateful_model_without_an_order_are_refused(shell: Shell) -> None:
    rows = frames(recording(0)[0])
    np.savez(shell.folder / "frames.npz", x=rows)
    (shell.folder / "profiles/this-machine.toml").write_text(
        ONE_ENGINE.format(name="this-machine", engine="onnxruntime")
    )
    done = shell(
        "build", "bursts.onnx", "--preprocess", "rules.toml", "--calibration", "frames.npz", "--holdout", "holdout",
        "--target", "this-machine", "--profiles", "profiles", "--key", "keys/default.key.pem",
    )  # fmt: skip
    assert done.returncode == 4
    assert "an array `recording` with one number for each sample" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_client_sees_neither_the_state_input_nor_the_state_output(device: Device) -> None:
    with Client(device.socket) as client:
        told = client.metadata("bursts")
    assert [spec["name"] for spec in told["inputs"]] == ["x"]
    assert [spec["name"] for spec in told["outputs"]] == ["scores", "scores_classes", "scores_probabilities"]
