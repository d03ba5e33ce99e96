"""Make the example of sound: a spotter of four spoken commands.

espeak-ng speaks the commands and other words, in many voices, at many speeds. The script trains a small convolutional
network on windows of that speech, and writes into a folder (its own, or the given one) `keyword.onnx`, and
`calibration/` and `holdout/` with a WAV file for each recording. No voice of the hold-out is among the voices of the
training. It takes a few minutes; the files are committed, so you need it only to change them.

    sudo apt-get install espeak-ng
    python -m examples.keyword.make [FOLDER]
    edgert build examples/keyword/keyword.toml
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.signal_rules import Sound
from edgert.processing.signals.preprocess import SignalPreprocessor
from edgert.processing.signals.resample import resample
from edgert.tensors import TensorSpec
from edgert_deploy.packager.samples.processing import read_preprocess
from edgert_deploy.packager.sources.source_model import SourceModel
from examples.keyword.network import train, write_onnx

Array = NDArray[Any]

HERE = Path(__file__).parent
LABELS = tuple((HERE / "labels.txt").read_text().split())
OTHER = len(LABELS) - 1
OTHERS = (
    "yes", "no", "left", "right", "music", "seven", "window", "open", "please", "hello", "radio", "number", "low", "after",
    "shop", "order", "step", "later", "soft", "water", "dark", "house", "big", "morning", "the pump is running",
    "what is the time", "good morning", "turn it around", "one more cup of coffee",
)  # fmt: skip
VOICES = (
    "en", "en-us", "en-gb-scotland", "en-gb-x-rp", "en+m1", "en+m2", "en+m3", "en+m6", "en-us+m3", "en-us+m5", "en-us+m8",
    "en-us+f1", "en+f2", "en+f3", "en-gb-scotland+f2",
)  # fmt: skip
HOLDOUT_VOICES = ("en+m4", "en-us+m7", "en+f4", "en-us+f5")
RATE_HZ, LENGTH = 8000, 8000
SPOKEN = 130  # utterances of each keyword; other words have as many utterances as all keywords together
WINDOWS = 6  # windows of each utterance
CALIBRATION, HOLDOUT = 3, 6  # recordings of each label
BLOCK = 256  # windows at once
RECORDING = 2 * LENGTH
ACCURACY_MIN = 0.93
SPEC = TensorSpec("features", "FP32", (-1, 32, 1, 51))


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("espeak-ng") is None:
        print("error: espeak-ng is missing; install it: sudo apt-get install espeak-ng", file=sys.stderr)
        return 1
    random = np.random.default_rng(7)
    print("speaking", file=sys.stderr)
    spoken = [
        utterances(random, label, VOICES, SPOKEN * (OTHER if label == OTHER else 1)) for label in range(len(LABELS))
    ]
    held = [utterances(random, label, HOLDOUT_VOICES, 24) for label in range(len(LABELS))]
    trained, (inputs, truth) = windows(random, spoken), windows(random, held)
    network = train(*trained, random)
    accuracy = float((network.scores(inputs).argmax(axis=1) == truth).mean())
    print(f"accuracy {accuracy:.4f} on {len(truth)} windows of voices that were not trained")
    if accuracy < ACCURACY_MIN:
        print(f"below {ACCURACY_MIN}: no file was written", file=sys.stderr)
        return 1
    write_onnx(network, folder / "keyword.onnx")
    write_recordings(np.random.default_rng(8), folder)
    return 0


def write_recordings(random: np.random.Generator, folder: Path) -> None:
    """Write a recording of two seconds for each sample, and a recording of two commands and another word."""
    for name, voices, count in (("calibration", VOICES, CALIBRATION), ("holdout", HOLDOUT_VOICES, HOLDOUT)):
        shutil.rmtree(folder / name, ignore_errors=True)
        for label in range(len(LABELS)):
            for i, words in enumerate(utterances(random, label, voices, count)):
                write_wav(folder / name / LABELS[label] / f"{i}.wav", recording(random, [words], RECORDING))
    commands = [utterances(random, label, HOLDOUT_VOICES, 1)[0] for label in (0, OTHER, 2)]
    write_wav(folder / "commands.wav", recording(random, commands, 6 * LENGTH))


def utterances(random: np.random.Generator, label: int, voices: tuple[str, ...], count: int) -> list[Array]:
    """Return `count` recordings of the keyword `label` or of other words, without silence: FP32 [time]."""
    words = OTHERS if label == OTHER else LABELS[label : label + 1]
    return [speak(words[i % len(words)], str(random.choice(voices)), random) for i in range(count)]


def speak(text: str, voice: str, random: np.random.Generator) -> Array:
    speed, pitch = random.integers(130, 200), random.integers(25, 75)
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", text]
    with wave.open(io.BytesIO(subprocess.run(command, capture_output=True, check=True).stdout)) as file:
        samples = np.frombuffer(file.readframes(1 << 30), np.int16)  # the header does not give the number of frames
        sound = resample(samples.astype(np.float32) / np.float32(32768), file.getframerate(), RATE_HZ)
    loud = np.flatnonzero(np.abs(sound) > 0.01)
    return np.asarray(sound[loud[0] : loud[-1] + 1] / np.abs(sound).max())


def windows(random: np.random.Generator, spoken: list[list[Array]]) -> tuple[Array, Array]:
    """Return features of windows with utterances at any place, and their labels.

    A window has the label of a keyword if it contains the whole keyword. If it contains less than 40 % of the keyword,
    its label is other sound.
    """
    made, labels = [], []
    for label, group in enumerate(spoken):
        for sound in group:
            for i in range(WINDOWS):
                whole = i < WINDOWS * 3 // 4
                shown = len(sound) if whole else int(len(sound) * random.uniform(0, 0.4))
                begin = random.integers(0, max(1, LENGTH - shown)) if whole else LENGTH - shown
                window = np.zeros(LENGTH, np.float32)
                part = sound[:shown][: LENGTH - begin]
                window[begin : begin + len(part)] = part
                if not whole and random.random() < 0.5:
                    window[:] = 0
                    window[:shown] = sound[len(sound) - shown :][:LENGTH]
                made.append(noisy(random, window))
                labels.append(label if whole else OTHER)
    rule = read_preprocess(HERE / "features.toml", SourceModel(HERE, None, "0" * 64, 1, (SPEC,), ()))
    assert isinstance(rule, Sound)
    preprocessor = SignalPreprocessor(rule, SPEC)
    features = [preprocessor.features(np.stack(made[i : i + BLOCK])) for i in range(0, len(made), BLOCK)]
    return np.concatenate(features), np.array(labels)


def noisy(random: np.random.Generator, sound: Array) -> Array:
    """Return `sound` at another loudness, with noise that is white or louder in the bass."""
    noise = random.standard_normal(len(sound), np.float32)
    if random.random() < 0.5:
        noise = np.convolve(noise, np.full(8, 8**-0.5, np.float32), "same")
    level = np.float32(10 ** random.uniform(-3, -2))
    return np.asarray(np.clip(sound * np.float32(random.uniform(0.3, 0.9)) + noise * level, -1, 1))


def recording(random: np.random.Generator, sounds: list[Array], length: int) -> Array:
    """Return the sounds one after the other, each in the middle of its part of the recording, with noise."""
    made = np.zeros(length, np.float32)
    part = length // len(sounds)
    for i, sound in enumerate(sounds):
        kept = sound[:part]
        begin = i * part + (part - len(kept)) // 2
        made[begin : begin + len(kept)] = kept
    return noisy(random, made)


def write_wav(path: Path, sound: Array) -> None:
    """Write `sound` with 8 bits a sample: this halves the size and is good enough for speech."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(1)
        file.setframerate(RATE_HZ)
        file.writeframes(np.clip(np.round(sound * 127 + 128), 0, 255).astype(np.uint8).tobytes())


if __name__ == "__main__":
    sys.exit(main())
