"""The example of embeddings: its model's graph, its processing files, and its sentences."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from edgert.bundle.text_rules import Embed, Text
from edgert.processing.answers.embedding import embeddings
from edgert_deploy.packager.samples.processing import read_postprocess, read_preprocess
from edgert_deploy.packager.sources.formats.convert import Conversion
from edgert_deploy.packager.sources.onnx_graph.bucket_axis import read_buckets
from edgert_deploy.packager.sources.source_model import load_source
from examples.embeddings.make import sentences
from examples.embeddings.minilm import HIDDEN, LAYERS, write_minilm
from tests.support.models.intents import tokenizer_json
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples/embeddings"
WIDE, WORDS, PLACES = 16, 40, 64


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights under MiniLM's names, random and with a narrow feed-forward layer."""
    from safetensors.numpy import save_file

    random, path = np.random.default_rng(0), tmp_path_factory.mktemp("minilm") / "model.safetensors"
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (WORDS, HIDDEN),
        "embeddings.position_embeddings.weight": (PLACES, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
    }
    dense = {f"attention.self.{part}": (HIDDEN, HIDDEN) for part in ("query", "key", "value")}
    dense |= {
        "attention.output.dense": (HIDDEN, HIDDEN),
        "intermediate.dense": (WIDE, HIDDEN),
        "output.dense": (HIDDEN, WIDE),
    }
    for layer in (f"encoder.layer.{i}." for i in range(LAYERS)):
        for name, shape in dense.items():
            shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
    norms = ["embeddings.LayerNorm"]
    norms += [f"encoder.layer.{i}.{part}.LayerNorm" for i in range(LAYERS) for part in ("attention.output", "output")]
    for name in norms:
        shapes |= {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}
    save_file({name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}, path)
    return path


def run(path: Path, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"input_ids": ids, "attention_mask": mask})[0])


def test_padding_does_not_change_the_answer_and_the_fixed_form_gives_the_mean(weights: Path, tmp_path: Path) -> None:
    write_minilm(weights, tmp_path / "open.onnx")
    write_minilm(weights, tmp_path / "fixed.onnx", 8)
    ids, ones = np.random.default_rng(1).integers(0, WORDS, (2, 5)), np.ones((2, 5), np.int64)
    padded, mask = np.pad(ids, ((0, 0), (0, 3))), np.pad(ones, ((0, 0), (0, 3)))
    states = run(tmp_path / "open.onnx", ids, ones)
    np.testing.assert_allclose(run(tmp_path / "open.onnx", padded, mask)[:, :5], states, atol=1e-4)
    np.testing.assert_allclose(run(tmp_path / "fixed.onnx", padded, mask), states.mean(axis=1), atol=1e-4)
    rule = Embed("y", mask="attention_mask", normalize=False)
    np.testing.assert_allclose(embeddings(rule, states, ones), states.mean(axis=1), atol=1e-5)


def test_the_files_of_the_example_fit_its_model(weights: Path, tmp_path: Path) -> None:
    for file in EXAMPLE.glob("*.toml"):
        shutil.copy(file, tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    write_minilm(weights, tmp_path / "minilm.onnx")
    source = load_source(tmp_path / "minilm.onnx", Conversion(buckets=read_buckets("tokens=16,32")))
    rule = read_preprocess(tmp_path / "text.toml", source)
    assert isinstance(rule, Text)
    assert (rule.inputs, rule.max_tokens) == (("input_ids", "attention_mask"), 32)
    after = read_postprocess(tmp_path / "embedding.toml", source, None, rule)
    assert after == Embed("last_hidden_state", mask="attention_mask")


def test_the_sentences_of_the_example_differ_and_are_the_same_in_each_run() -> None:
    found = sentences(450)
    assert len(set(found)) == 450
    assert found == sentences(450)
    assert all(3 <= len(sentence.split()) <= 20 for sentence in found)
