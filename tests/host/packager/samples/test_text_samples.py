"""Texts in files become the tokens that a device makes from them. The rule's defaults fit the model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("tokenizers")

from edgert.bundle.buckets import Buckets, PaddedInput
from edgert.bundle.rules import Preprocess
from edgert.bundle.text_rules import Embed, Text
from edgert.cli.tensor_files import write_outputs
from edgert.errors import CalibrationInvalid, ConfigInvalid
from edgert.processing.text import TextPreprocessor
from edgert.tensors import TensorSpec, byte_rows
from edgert_deploy.packager.samples.processing import read_postprocess, read_preprocess
from edgert_deploy.packager.samples.samples import CalibrationSet, load_samples
from edgert_deploy.packager.sources.source_model import SourceModel
from tests.support.models.intents import LABELS, sentences, tokenizer_json, write_sentences

NAMES = ("input_ids", "attention_mask", "token_type_ids")


def source(length: int, *sizes: int, names: tuple[str, ...] = NAMES) -> SourceModel:
    inputs = tuple(TensorSpec(name, "INT64", (-1, length)) for name in names)
    outputs = (TensorSpec("last_hidden_state", "FP32", (-1, length, 8)),)
    buckets = Buckets("tokens", sizes, tuple(PaddedInput(name, 1) for name in names)) if sizes else None
    return SourceModel(Path("m.onnx"), None, "0" * 64, 1, inputs, outputs, buckets=buckets)


@pytest.fixture
def rule_file(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (tmp_path / "text.toml").write_text('[text]\ntokenizer = "tokenizer.json"\n')
    return tmp_path / "text.toml"


def rule_of(path: Path, model: SourceModel) -> Text:
    rule = read_preprocess(path, model)
    assert isinstance(rule, Text)
    return rule


def load(path: Path, rule_file: Path, model: SourceModel) -> CalibrationSet:
    return load_samples(path, model, rule_of(rule_file, model), LABELS, at_least=1)


def test_the_files_of_a_folder_give_the_tokens_that_a_device_computes(tmp_path: Path, rule_file: Path) -> None:
    model, rows = source(24), sentences(20, 4)
    samples = load(write_sentences(tmp_path / "texts", rows), rule_file, model)
    by_file = sorted(range(20), key=lambda i: f"{LABELS[rows[i][1]]}/{i:04}")
    assert samples.labels is not None
    assert samples.labels.tolist() == [rows[i][1] for i in by_file]
    device = TextPreprocessor(rule_of(rule_file, model), model.inputs, (tmp_path / "tokenizer.json").read_bytes())
    assert samples.raw is not None
    for made in (device(samples.raw), device(byte_rows([rows[i][0].encode() for i in by_file]))):
        for name in NAMES:
            assert made[name].tobytes() == samples.inputs[name].tobytes()


def test_a_file_has_a_text_on_each_line(tmp_path: Path, rule_file: Path) -> None:
    (tmp_path / "texts.txt").write_bytes(b"\xef\xbb\xbfplay some jazz\r\n\n  dim the lights \n")
    samples = load(tmp_path / "texts.txt", rule_file, source(24))
    assert samples.raw is not None
    assert [bytes(row).rstrip(b"\0") for row in samples.raw] == [b"play some jazz", b"dim the lights"]
    assert samples.labels is None


def test_with_buckets_each_text_keeps_its_own_length(tmp_path: Path, rule_file: Path) -> None:
    (tmp_path / "texts.txt").write_text("play\nwake me in ten minutes\n")
    samples = load(tmp_path / "texts.txt", rule_file, source(-1, 4, 16))
    assert samples.lengths is not None
    assert samples.lengths[0] == 3 < samples.lengths[1] <= 16
    assert samples.sizes.tolist() == [4, 16]


def test_arrays_hold_the_models_own_tokens(tmp_path: Path, rule_file: Path) -> None:
    write_outputs(tmp_path / "s.npz", {name: np.ones((3, 24), np.int64) for name in NAMES})
    assert load(tmp_path / "s.npz", rule_file, source(24)).raw is None


def test_a_text_that_cannot_be_a_sample_is_refused(tmp_path: Path, rule_file: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CalibrationInvalid, match=r"has 0 texts; at least 1 are needed: give a folder with one \.txt"):
        load(tmp_path / "empty", rule_file, source(24))
    (tmp_path / "empty" / "blank.txt").write_text("\n")
    with pytest.raises(CalibrationInvalid, match=r"blank\.txt holds no text"):
        load(tmp_path / "empty", rule_file, source(24))
    (tmp_path / "bad.txt").write_bytes(b"good\nbad \xff\n")
    with pytest.raises(CalibrationInvalid, match=r"sample 1 of .*bad\.txt: text 0 of the request is not UTF-8"):
        load(tmp_path / "bad.txt", rule_file, source(24))
    more = source(24)
    more = SourceModel(more.path, None, "0" * 64, 1, (*more.inputs, TensorSpec("x", "FP32", (-1, 2))), more.outputs)
    with pytest.raises(CalibrationInvalid, match=r"has other inputs too: give an \.npz"):
        load(tmp_path / "bad.txt", rule_file, more)


def test_the_rule_finds_inputs_with_the_usual_names_and_the_length_of_the_model(rule_file: Path) -> None:
    tokenizer = str(rule_file.parent / "tokenizer.json")
    assert rule_of(rule_file, source(24)) == Text(tokenizer, *(NAMES[0], 24, *NAMES[1:]))
    assert rule_of(rule_file, source(-1, 8, 16, names=NAMES[:2])) == Text(tokenizer, NAMES[0], 16, NAMES[1])
    rule_file.write_text('[text]\ntokenizer = "tokenizer.json"\ninput = "ids"\nmax_tokens = 9\ntruncation = "left"')
    assert rule_of(rule_file, source(24, names=("ids",))) == Text(tokenizer, "ids", 9, truncation="left")


@pytest.mark.parametrize(
    ("text", "names", "message"),
    [
        ("[text]", NAMES, "needs tokenizer, the path of a tokenizer.json"),
        ('[text]\ntokenizer = "other.json"', NAMES, "there is no .*other.json: check the name"),
        ('[text]\ntokenizer = "text.toml"', NAMES, "is not a tokenizer of the library tokenizers"),
        ('[text]\ntokenizer = "list.json"', NAMES, "is not a tokenizer of the library tokenizers"),
        ('[text]\ntokenizer = "half.json"', NAMES, "cannot use the tokenizer"),
        (
            '[text]\ntokenizer = "tokenizer.json"',
            ("a", "b"),
            r"needs input, the model's input for token ids .* inputs are a, b",
        ),
        ('[text]\ntokenizer = "tokenizer.json"\nmax_tokens = "x"', NAMES, "max_tokens"),
        ('[text]\ntokenizer = "tokenizer.json"\nmax_tokens = 99', NAMES, "allows 1 to 24"),
        ('[text]\ntokenizer = "tokenizer.json"\nlower = true', NAMES, "unknown key 'lower'"),
        ('scale = 2\n[text]\ntokenizer = "tokenizer.json"', NAMES, "exactly one table"),
    ],
)
def test_a_wrong_file_is_refused(rule_file: Path, text: str, names: tuple[str, ...], message: str) -> None:
    (rule_file.parent / "list.json").write_text("[1]")
    (rule_file.parent / "half.json").write_text("{}")
    rule_file.write_text(text)
    with pytest.raises(ConfigInvalid, match=message):
        read_preprocess(rule_file, source(24, names=names))


def test_the_pad_is_read_from_the_tokenizer(rule_file: Path) -> None:
    value = json.loads(tokenizer_json())
    value["added_tokens"][0]["content"] = "<mine>"
    path = rule_file.parent / "tokenizer.json"
    for pad_id, padding in ((0, None), (3, {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None,
                                            "pad_id": 3, "pad_type_id": 0, "pad_token": "[SEP]"})):  # fmt: skip
        path.write_text(json.dumps({**value, "padding": padding}))
        assert rule_of(rule_file, source(24)).pad_id == pad_id


def test_an_embedding_uses_the_only_output_and_the_mask_of_the_text_by_default(tmp_path: Path, rule_file: Path) -> None:
    model, path = source(24), tmp_path / "post.toml"
    path.write_text("[embed]")
    assert read_postprocess(path, model, None, rule_of(rule_file, model)) == Embed("last_hidden_state", mask=NAMES[1])
    path.write_text('[embed]\npooling = "cls"\nnormalize = false')
    assert read_postprocess(path, model, None) == Embed("last_hidden_state", "cls", normalize=False)
    path.write_text("[embed]")
    with pytest.raises(ConfigInvalid, match="give mask = the input's name"):
        read_postprocess(path, model, None, Preprocess("x"))
    path.write_text("[embed]\nsize = 3")
    with pytest.raises(ConfigInvalid, match="unknown key 'size'"):
        read_postprocess(path, model, None)
