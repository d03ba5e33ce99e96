"""A model with an open axis, from `edgert build --buckets` to clients that send any length, on each engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert import Client
from edgert.config import read_config
from edgert.errors import RequestError
from edgert.versions.installed import load_live
from edgert.versions.slot_store import SlotStore
from tests.support.devices import Device
from tests.support.examples import ENGINES, Built, built, served
from tests.support.models.texts import LARGEST, MODEL, answers_to, text, texts, write_texts
from tests.support.shell import ShellHere

# Transformers in ONNX Runtime get the recipe dynamic-range, in which the items of a batch share the ranges of
# activations.
ATOL = {"onnxruntime": 0.05}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Built:
    shell = ShellHere(tmp_path_factory.mktemp("text"))
    write_texts(shell.folder / "calibration", texts(60))
    write_texts(shell.folder / "holdout", texts(60, seed=1000))
    samples = ("--calibration", "calibration", "--holdout", "holdout", "--max-drop", "0.05")
    return built(shell, "text", ENGINES, str(MODEL), "--buckets", "tokens=8,16,32", *samples)


@pytest.fixture(scope="module", params=ENGINES)
def device(request: pytest.FixtureRequest, bundle: Built) -> Iterator[Device]:
    with served(bundle, request.param) as device:
        yield device


@pytest.fixture
def atol(request: pytest.FixtureRequest) -> float:
    return ATOL.get(request.node.callspec.params["device"], 1e-3)


def test_the_manifest_describes_the_buckets_and_has_a_golden_sample_for_each_bucket(device: Device) -> None:
    version = load_live(SlotStore(device.state.models / "text"), read_config(device.state))
    stated = json.loads(version.manifest.to_bytes())["buckets"]
    assert (stated["axis"], stated["sizes"]) == ("tokens", [8, 16, 32])
    assert stated["inputs"] == [{"name": name, "axis": 1, "value": 0.0} for name in ("ids", "mask")]
    assert stated["outputs"] == [{"name": "states", "axis": 1, "divisor": 1}]
    lengths = stated["golden_lengths"]
    assert all(any(least < n <= most for n in lengths) for least, most in ((0, 8), (8, 16), (16, 32)))


@pytest.mark.parametrize("length", [2, 7, 8, 9, 16, 17, 31, 32])
def test_a_request_of_any_length_gets_the_models_own_answer_in_this_length(client: Client, length: int) -> None:
    sent = text(length, seed=5)
    got = client.infer("text", sent)
    want = answers_to(sent)
    assert got["states"].shape == want["states"].shape == (length, 16)
    for name, array in want.items():
        cosine = (array * got[name]).sum() / np.linalg.norm(array) / np.linalg.norm(got[name])
        assert cosine > 0.99, (name, length)


def test_a_longer_text_is_refused_with_the_largest_bucket(client: Client) -> None:
    with pytest.raises(RequestError, match="length 33 along axis 'tokens'; the model was built for 1 to 32"):
        client.infer("text", text(LARGEST + 1))
    assert client.infer("text", text(3))["scores"].shape == (4,)  # the connection continues


def test_inputs_of_different_lengths_are_refused(client: Client) -> None:
    with pytest.raises(RequestError, match="differ in length along axis 'tokens'"):
        client.infer("text", {"ids": text(5)["ids"], "mask": text(6)["mask"]})


def test_many_clients_of_many_lengths_get_their_own_answers(device: Device, atol: float) -> None:
    sent = [text(2 + i % 31, seed=i) for i in range(96)]
    with device.client() as alone:
        expected = [alone.infer("text", one, cache=False) for one in sent]

    def ask(rows: list[int]) -> list[dict[str, object]]:
        with device.client() as client:
            return [dict(client.infer("text", sent[row], cache=False)) for row in rows]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, [list(range(i, 96, 8)) for i in range(8)]))
    for i, own in enumerate(answers):
        for row, answer in zip(range(i, 96, 8), own, strict=True):
            for name, array in expected[row].items():
                np.testing.assert_allclose(np.asarray(answer[name]), array, atol=atol)


def test_a_batch_of_samples_of_one_length_may_be_one_request(client: Client, atol: float) -> None:
    rows = [text(10, seed=i) for i in range(3)]
    got = client.infer("text", {name: np.stack([row[name] for row in rows]) for name in ("ids", "mask")})
    assert got["states"].shape == (3, 10, 16)
    for i, row in enumerate(rows):
        np.testing.assert_allclose(got["scores"][i], client.infer("text", row)["scores"], atol=atol)
