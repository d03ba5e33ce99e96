"""Silero VAD in a session of EdgeRT and in the loop of its package: difference of answers, cost of a chunk.

The package's `OnnxWrapper` needs PyTorch, so this benchmark has the same loop in NumPy. The loop passes 64 samples of
the previous chunk, the 512 samples of this chunk and the state to ONNX Runtime with one thread. The device serves
artifacts of the same model, each built from speech with the state carried along. `same` is the share of chunks with the
same decision. The rounds of the loop and of the artifacts take turns.

    python -m bench.streams            # a table; needs the models of `make zoo`
    python -m bench.streams --json     # JSON lines
"""

from __future__ import annotations

import argparse
import statistics
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.support.devices import deploy, edgert, start, state_folder
from bench.support.tables import emit
from bench.zoo import data
from bench.zoo.packages import model_file
from edgert import Client

RATE_HZ, CHUNK, LEAD, SECONDS = 16_000, 512, 64, 20
COLUMNS = ("who", "precision", "difference_max", "same", "p50_us", "of_loop")
RULES = f"""
[sound]
rate_hz = {RATE_HZ}
length = {CHUNK + LEAD}
step = {CHUNK}
lead = {LEAD}
features = "samples"

[[state]]
input = "state"
output = "stateN"
"""

Floats = NDArray[np.float32]
Score = Callable[[Floats], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    emit(measure(options.rounds), COLUMNS, options.json)


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return a row for the loop, and one for each precision of the device."""
    path = model_file("silero-vad", "silero_vad/data/silero_vad_openvino_16k.onnx")
    precisions = ("fp32", "int8")
    with state_folder() as state:
        _serve(state, path, precisions)
        sound = _speech(SECONDS, seed=99)
        scores: dict[str, Floats] = {}
        times: dict[str, list[float]] = {}
        with Client(state / "edgert.sock") as client:
            for _ in range(rounds):
                loop = package_loop(path)
                scores["loop"] = _run(loop, sound, times.setdefault("loop", []))
                for precision in precisions:
                    with client.session(f"vad-{precision}") as stream:

                        def ask(chunk: Floats, stream: Any = stream) -> float:
                            return float(stream.infer(chunk)["output"][0, 0])

                        scores[precision] = _run(ask, sound, times.setdefault(precision, []))
    return [_row(name, scores[name], scores["loop"], times[name], times["loop"]) for name in scores]


def package_loop(path: Path) -> Score:
    """Return a function that scores one chunk after the other, as the package does."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.inter_op_num_threads = settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    kept = {"state": np.zeros((2, 1, 128), np.float32), "context": np.zeros((1, LEAD), np.float32)}

    def score(chunk: Floats) -> float:
        window = np.concatenate([kept["context"], chunk[None]], axis=1)
        out, kept["state"] = session.run(None, {"input": window, "state": kept["state"]})
        kept["context"] = window[:, -LEAD:]
        return float(out[0, 0])

    return score


def _serve(state: Path, path: Path, precisions: tuple[str, ...]) -> None:
    folder = state.parent
    edgert("keys", "new", "--dir", str(folder / "keys"))
    start(state, (folder / "keys/default.pem").read_bytes())
    (folder / "rules.toml").write_text(RULES)
    for name, seeds in (("calibration", range(1, 5)), ("holdout", range(11, 15))):
        (folder / name).mkdir()
        for seed in seeds:
            _write(folder / name / f"{seed}.wav", _speech(5, seed))
    for precision in precisions:
        bundle = folder / f"vad-{precision}.edgert"
        edgert(
            "build", str(path), "--name", f"vad-{precision}", "--precision", precision, "--max-drop", "0.1",
            "--preprocess", str(folder / "rules.toml"), "--calibration", str(folder / "calibration"),
            "--holdout", str(folder / "holdout"), "--target", "this-machine", "--engines", "first",
            "--key", str(folder / "keys/default.key.pem"), "--out", str(bundle),
        )  # fmt: skip
        deploy(state, f"vad-{precision}", bundle)


def _run(score: Score, sound: Floats, times: list[float]) -> Floats:
    found = []
    for at in range(0, len(sound) - CHUNK + 1, CHUNK):
        chunk = sound[at : at + CHUNK]
        began = time.perf_counter()
        found.append(score(chunk))
        times.append((time.perf_counter() - began) * 1e6)
    return np.array(found, np.float32)


def _row(name: str, scores: Floats, exact: Floats, times: list[float], loop_times: list[float]) -> dict[str, Any]:
    p50_us = statistics.median(times)
    return {
        "who": "the package's loop" if name == "loop" else "a session",
        "precision": "fp32" if name == "loop" else name,
        "difference_max": round(float(np.abs(scores - exact).max()), 6),
        "same": round(float(((scores > 0.5) == (exact > 0.5)).mean()), 4),
        "p50_us": round(p50_us, 1),
        "of_loop": round(p50_us / statistics.median(loop_times), 2),
    }


def _speech(seconds: float, seed: int) -> Floats:
    """Return speech, rounded to the values that a 16-bit file can hold."""
    sound = np.asarray(data.speech(seconds, RATE_HZ, seed), np.float32)
    return (np.round(np.clip(sound, -1, 0.9999) * 32768) / 32768).astype(np.float32)


def _write(path: Path, sound: Floats) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes((sound * 32768).astype("<i2").tobytes())


if __name__ == "__main__":
    main()
