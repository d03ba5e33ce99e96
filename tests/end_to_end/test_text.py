"""A model of text, from `edgert build` to clients that send plain text, on each engine."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("tokenizers")

from edgert import Client
from edgert.config import read_config
from edgert.errors import EngineMissing, RequestError
from edgert.versions.install import install
from edgert.versions.slot_store import SlotStore
from tests.support.devices import WAIT_S_MAX, Device, http_port
from tests.support.examples import ENGINES, Built, built, served
from tests.support.models.intents import LABELS, sentences, tokens, write_model, write_sentences
from tests.support.shell import Shell, ShellHere

ROWS = sentences(190, 7)
CALIBRATION, HOLDOUT, TEXTS = ROWS[:60], ROWS[60:160], ROWS[160:]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    shell = ShellHere(tmp_path_factory.mktemp("text"))
    write_model(shell.folder)
    write_sentences(shell.folder / "calibration", CALIBRATION)
    write_sentences(shell.folder / "holdout", HOLDOUT)
    (shell.folder / "text.toml").write_text('[text]\ntokenizer = "tokenizer.json"\n')
    return shell


def built_for(shell: Shell, engines: Sequence[str], *options: str, out: str = "") -> Built:
    words = ("--preprocess", "text.toml", "--calibration", "calibration", "--holdout", "holdout", *options)
    return built(shell, "intents", engines, "intents.onnx", *words, out=out)


@pytest.fixture(scope="module")
def bundle(shell: Shell) -> Built:
    return built_for(shell, ENGINES, "--buckets", "tokens=8,16", "--labels", "labels.txt")


@pytest.fixture(scope="module", params=ENGINES)
def device(request: pytest.FixtureRequest, bundle: Built) -> Iterator[Device]:
    with served(
        bundle, request.param, '[http]\nlisten = "127.0.0.1:0"\n'
    ) as device:  # with golden texts, whose tokens the device computes
        yield device


def wanted(client: Client, text: str | bytes | dict[str, object]) -> str:
    return client.labels("intents")[int(client.infer("intents", text)["scores_classes"][0])]  # type: ignore[arg-type]


def test_plain_text_gives_the_right_answer(client: Client) -> None:
    found = [wanted(client, text) for text, _ in TEXTS]
    assert found == [LABELS[label] for _, label in TEXTS]
    text = TEXTS[0][0]
    assert wanted(client, text.encode()) == wanted(client, {"input_ids": text}) == found[0]
    answer = client.infer("intents", text + " ", trace=True, cache=False)
    assert answer.stages.preprocess_us > 0


def test_texts_of_one_request_are_padded_to_the_longest(client: Client) -> None:
    texts = [text for text, _ in TEXTS[:8]]
    together = client.infer("intents", texts)
    ids, mask = tokens(texts)
    assert together["states"].shape[:2] == ids.shape
    own = client.infer("intents", {"input_ids": ids, "attention_mask": mask})
    for name in ("scores", "states"):
        np.testing.assert_array_equal(together[name], own[name])
    for i, text in enumerate(texts):
        assert client.infer("intents", text)["scores"].argmax() == together["scores"][i].argmax()


def test_a_long_text_is_cut_and_an_empty_text_has_the_special_tokens(client: Client) -> None:
    assert client.infer("intents", "play some jazz " * 100)["states"].shape[0] == 16
    assert client.infer("intents", "")["states"].shape[0] == 2
    assert client.infer("intents", ["", "play some jazz"])["scores"].shape == (2, len(LABELS))


def test_bytes_that_are_not_text_are_refused_and_the_connection_continues(client: Client) -> None:
    with pytest.raises(
        RequestError, match="text 0 of the request is not UTF-8: invalid start byte at byte 5: encode it"
    ):
        client.infer("intents", b"play \xff")
    with pytest.raises(RequestError, match="the text is not valid Unicode"):
        client.infer("intents", "play \ud800")
    with pytest.raises(RequestError, match="at most 262144 are allowed: shorten it"):
        client.infer("intents", "x" * 300_000)
    with pytest.raises(
        RequestError, match=r"takes inputs \['input_ids', 'attention_mask'\], or \['input_ids'\] with text"
    ):
        client.infer("intents", {"text": "play"})
    with pytest.raises(RequestError, match=r"takes UINT8 \[-1, -1\]"):
        client.infer("intents", {"input_ids": np.zeros((1, 4), np.int64)})  # the mask is missing
    assert wanted(client, TEXTS[0][0]) == LABELS[TEXTS[0][1]]


def test_text_over_http_is_a_tensor_of_strings(device: Device) -> None:
    pytest.importorskip("httptools")
    text, label = TEXTS[0]
    entry = {"name": "input_ids", "datatype": "BYTES", "shape": [1], "data": [text]}
    url = f"http://127.0.0.1:{http_port(device)}/v2/models/intents/infer"
    body = json.dumps({"inputs": [entry], "outputs": [{"name": "scores_classes"}]}).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=WAIT_S_MAX
    ) as got:
        assert json.load(got)["outputs"][0]["data"] == [label]


def test_a_device_without_tokenizers_refuses_before_anything_changes(
    bundle: Built, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = SlotStore(device.state.models / "intents").read()
    assert device.run("status")["text"] is True
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # now an import fails as if it were not installed
    with pytest.raises(EngineMissing, match="run edgert bootstrap DEVICE --with text on the host"):
        install(bundle.bundle, device.state, read_config(device.state))
    assert SlotStore(device.state.models / "intents").read() == before


def test_vectors_are_pooled_and_normalized_on_the_device(shell: Shell, tmp_path: Path) -> None:
    (shell.folder / "embed.toml").write_text('[embed]\noutput = "states"\n')
    fixed = ("--input", "input_ids=1,16", "--input", "attention_mask=1,16")
    made = built_for(shell, ["onnxruntime"], *fixed, "--postprocess", "embed.toml", out="vectors")
    with served(made, "onnxruntime") as device:
        with device.client() as client:
            for text, _ in TEXTS[:5]:
                answer = client.infer("intents", text)
                ids, _ = tokens([text])
                mean = answer["states"][: ids.shape[1]].mean(axis=0)
                np.testing.assert_allclose(
                    answer["states_embedding"], mean / np.linalg.norm(mean), rtol=1e-5, atol=1e-6
                )
        said = shell("infer", "intents", "--text", TEXTS[0][0], "--socket", str(device.socket), "--json")
        assert said.returncode == 0, said.stderr
        assert len(json.loads(said.stdout)["outputs"]["states_embedding"]["values"]) == 24
        (tmp_path / "one.txt").write_text(TEXTS[0][0] + "\n")
        same = shell("infer", "intents", "--input", str(tmp_path / "one.txt"), "--socket", str(device.socket), "--json")
        assert json.loads(same.stdout) == json.loads(said.stdout)
