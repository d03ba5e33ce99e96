"""A small model of text, made in seconds, with its own tokenizer: the intents of sentences to a voice assistant."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

LABELS = ("light", "music", "timer", "weather")
TEMPLATES = {
    "light": ("{please} {on} the {lamp} in the {room}", "{please} make it {bright} in the {room} {day}"),
    "music": ("{please} play {song} in the {room}", "turn {song} {volume} {day}", "I want to hear {song} {day}"),
    "timer": ("{please} wake me in {number} {unit} {day}", "{please} set a timer for {number} {unit}"),
    "weather": ("{please} tell me if it will {rain} {day}", "how {warm} is it in {city} {day}"),
}
WORDS = {
    "please": ("", "please", "can you", "hey"),
    "on": ("switch on", "switch off", "turn on", "dim"),
    "lamp": ("lamp", "light", "lights", "spotlight"),
    "room": ("kitchen", "hall", "bedroom", "bathroom", "garden"),
    "bright": ("dark", "bright", "brighter", "darker"),
    "song": ("some jazz", "the radio", "my favourite song", "an opera", "quiet music"),
    "volume": ("up", "down", "off", "louder"),
    "number": ("two", "five", "ten", "twenty", "ninety"),
    "unit": ("seconds", "minutes", "hours"),
    "rain": ("rain", "snow", "be sunny", "freeze"),
    "warm": ("warm", "cold", "windy"),
    "city": ("Paris", "Berlin", "Oslo", "Zürich", "東京"),
    "day": ("", "today", "tomorrow", "on Sunday", "this evening"),
}
TRAINED, SIZE, EPOCHS, LEARNING_RATE = 300, 24, 120, 0.02
VOCABULARY = 400


def sentences(count: int, seed: int) -> list[tuple[str, int]]:
    """Return `count` sentences that differ, each with the number of its label."""
    draw, found = random.Random(seed), dict[str, int]()
    while len(found) < count:
        label = draw.randrange(len(LABELS))
        words = {key: draw.choice(values) for key, values in WORDS.items()}
        found[" ".join(draw.choice(TEMPLATES[LABELS[label]]).format(**words).split())] = label
    return list(found.items())


def write_sentences(folder: Path, rows: list[tuple[str, int]]) -> Path:
    """Write a file for each sentence, in a folder named after its label."""
    for i, (text, label) in enumerate(rows):
        (folder / LABELS[label]).mkdir(parents=True, exist_ok=True)
        (folder / LABELS[label] / f"{i:04}.txt").write_text(text + "\n", encoding="utf-8")
    return folder


@cache
def tokenizer_json() -> str:
    """Return a WordPiece tokenizer as BERT has it, trained on the sentences."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([text for text, _ in sentences(TRAINED, 1)], trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    text: str = tokenizer.to_str()
    return text


def write_model(folder: Path) -> None:
    """Write intents.onnx, with inputs named as in `transformers`, tokenizer.json and labels.txt."""
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (folder / "labels.txt").write_text("".join(f"{label}\n" for label in LABELS))
    _write_onnx(_trained(), folder / "intents.onnx")


def tokens(texts: list[str]) -> tuple[Array, Array]:
    """Return ids and mask INT64 [N, longest] by the library itself."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json())
    tokenizer.enable_padding()
    rows = tokenizer.encode_batch(texts)
    return np.array([row.ids for row in rows]), np.array([row.attention_mask for row in rows])


@cache
def _trained() -> dict[str, Array]:
    """Minimise the cross-entropy of one layer for each token, their mean, and another layer, by Adam."""
    rows = sentences(TRAINED, 1)
    ids, mask = tokens([text for text, _ in rows])
    labels, rng = np.array([label for _, label in rows]), np.random.default_rng(3)
    size = len(json.loads(tokenizer_json())["model"]["vocab"])
    shapes = {"words": (size, SIZE), "w1": (SIZE, SIZE), "b1": (SIZE,), "w2": (SIZE, len(LABELS)), "b2": (len(LABELS),)}
    network = {
        name: rng.normal(0, 0.3, shape) if len(shape) == 2 else np.zeros(shape) for name, shape in shapes.items()
    }
    first, second = ({name: np.zeros_like(w) for name, w in network.items()} for _ in range(2))
    share = mask[:, :, None] / mask.sum(axis=1)[:, None, None]
    for step in range(1, EPOCHS + 1):
        words = network["words"][ids]
        states = np.maximum(words @ network["w1"] + network["b1"], 0)
        pooled = (states * share).sum(axis=1)
        logits = pooled @ network["w2"] + network["b2"]
        slope = np.exp(logits - logits.max(axis=1, keepdims=True))
        slope /= slope.sum(axis=1, keepdims=True)
        slope[np.arange(len(labels)), labels] -= 1
        slope /= len(labels)
        back = (slope @ network["w2"].T)[:, None] * share * (states > 0)
        slopes = {"w2": pooled.T @ slope, "b2": slope.sum(axis=0), "b1": back.sum(axis=(0, 1))}
        slopes["w1"] = np.einsum("ntd,nte->de", words, back)
        slopes["words"] = np.zeros_like(network["words"])
        np.add.at(slopes["words"], ids, back @ network["w1"].T)
        for name, gradient in slopes.items():
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.999 * second[name] + 0.001 * gradient**2
            scale = np.sqrt(second[name] / (1 - 0.999**step)) + 1e-8
            network[name] = network[name] - LEARNING_RATE * first[name] / (1 - 0.9**step) / scale
    return {name: weights.astype(np.float32) for name, weights in network.items()}


def _write_onnx(network: dict[str, Array], path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    axes = {"last": np.array([2], np.int64), "tokens": np.array([1], np.int64)}
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["embedded"], "embedded"),
        helper.make_node("MatMul", ["embedded", "w1"], ["product"], "product"),
        helper.make_node("Add", ["product", "b1"], ["sum"], "sum"),
        helper.make_node("Relu", ["sum"], ["states"], "states"),
        helper.make_node("Cast", ["attention_mask"], ["floats"], "floats", to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["floats", "last"], ["wide"], "wide"),
        helper.make_node("Mul", ["states", "wide"], ["kept"], "kept"),
        helper.make_node("ReduceSum", ["kept", "tokens"], ["total"], "total", keepdims=0),
        helper.make_node("ReduceSum", ["wide", "tokens"], ["count"], "count", keepdims=0),
        helper.make_node("Div", ["total", "count"], ["pooled"], "pooled"),
        helper.make_node("Gemm", ["pooled", "w2", "b2"], ["scores"], "scores"),
    ]
    graph = helper.make_graph(
        nodes,
        "intents",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["N", "tokens"])
            for name in ("input_ids", "attention_mask")
        ],
        [
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", len(LABELS)]),
            helper.make_tensor_value_info("states", TensorProto.FLOAT, ["N", "tokens", SIZE]),
        ],
        [numpy_helper.from_array(array, name) for name, array in {**network, **axes}.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)
