"""Make plausible inputs: rendered text, photographs with people, spoken sentences, chords, files of many kinds.

Photographs come from scikit-image and scikit-learn, speech from espeak-ng. Everything is drawn from one seed.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import sysconfig
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Array = NDArray[Any]

WORDS = [
    "valve",
    "pump",
    "motor",
    "fan",
    "bearing",
    "shaft",
    "sensor",
    "relay",
    "panel",
    "north",
    "south",
    "east",
    "west",
    "inlet",
    "outlet",
    "pressure",
    "flow",
    "level",
    "alarm",
    "status",
    "ready",
    "stop",
    "start",
    "manual",
    "batch",
    "serial",
    "station",
    "line",
    "cell",
    "robot",
    "gripper",
    "camera",
    "light",
    "check",
    "total",
    "weight",
    "order",
    "2026",
    "4711",
    "A17",
    "B42",
    "kPa",
    "rpm",
    "12.5",
    "98%",
    "OK",
    "FAIL",
    "temp",
    "humid",
    "serve",
    "deploy",
    "edge",
    "model",
    "exact",
]
SENTENCES = (
    "The pump stopped because the inlet pressure was too low.",
    "Replace the bearing before the motor overheats.",
    "How do I reset my password?",
    "The weather is sunny with a light breeze today.",
    "She plays the violin in a small orchestra.",
    "Stocks fell sharply after the central bank's announcement.",
    "A cat is sleeping on the warm windowsill.",
    "The recipe needs two eggs and a cup of flour.",
    "Our flight was delayed by three hours.",
    "The museum opens at nine in the morning.",
    "He fixed the bicycle with a new chain.",
    "The train to the north leaves from platform four.",
)
PARAPHRASES = (
    "Too little pressure at the inlet made the pump halt.",
    "Change the bearing in time or the motor gets too hot.",
    "What can I do to change a forgotten password?",
    "It is a bright day with a gentle wind.",
    "She is a violinist in a chamber ensemble.",
    "Shares dropped after news from the central bank.",
    "The kitten naps by the sunny window.",
    "You need flour and a couple of eggs for this dish.",
    "We had to wait three hours for our plane.",
    "The exhibition can be visited from 9 am.",
    "He repaired his bike and put on another chain.",
    "Trains going north depart from track four.",
)


# Parts of Thai sentences about devices, weather and food. Thai has no spaces between words.
THAI = (
    "เครื่องจักรหยุดทำงาน",
    "อุณหภูมิสูงเกินไป",
    "วันนี้อากาศดีมาก",
    "พรุ่งนี้ฝนจะตกหนัก",
    "โปรดตรวจสอบเซ็นเซอร์",
    "เราไปกินข้าวกันเถอะ",
    "ร้านอาหารนี้อร่อยมาก",
    "ราคา 120 บาท",
    "กรุงเทพมหานครเป็นเมืองหลวง",
    "ฉันชอบอ่านหนังสือ",
    "เด็กนักเรียนกำลังเล่นฟุตบอล",
    "แรงดันน้ำลดลงช้าๆ",
    "ปั๊มน้ำตัวที่ 2 พร้อมใช้งาน",
    "ประตูโรงงานเปิดอยู่",
    "ไฟฟ้าดับเมื่อเวลา 10.30 น.",
    "ขอบคุณครับ",
)


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def phrases(count: int, seed: int) -> list[str]:
    """Draw `count` short phrases, as labels on machines have them."""
    rng = random(seed)
    return [" ".join(rng.choice(WORDS, int(rng.integers(1, 4)))) for _ in range(count)]


def text_line(text: str, height: int, width: int, rng: np.random.Generator) -> Image.Image:
    """Render one line of text, black or coloured on a light ground, slightly blurred and tilted."""
    ground = tuple(int(v) for v in rng.integers(190, 256, 3))
    ink = tuple(int(v) for v in rng.integers(0, 90, 3))
    font = ImageFont.load_default(size=int(height * rng.uniform(0.55, 0.75)))
    image = Image.new("RGB", (width, height), ground)
    ImageDraw.Draw(image).text((int(rng.integers(2, 8)), int(height * 0.12)), text, font=font, fill=ink)
    image = image.rotate(float(rng.uniform(-1.5, 1.5)), fillcolor=ground)
    return image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0, 0.7))))


def text_page(size: int, seed: int) -> Image.Image:
    """Render a page with several lines of text at different sizes."""
    rng = random(seed)
    page = Image.new("RGB", (size, size), tuple(int(v) for v in rng.integers(200, 256, 3)))
    top = int(rng.integers(5, 30))
    while top < size - 40:
        height = int(rng.integers(22, 48))
        width = int(rng.integers(size // 3, size - 30))
        text = phrases(1, int(rng.integers(1 << 30)))[0]
        page.paste(text_line(text, height, width, rng), (int(rng.integers(0, size - width)), top))
        top += height + int(rng.integers(6, 30))
    return page


def grounds() -> list[Image.Image]:
    """Return photographs without a person."""
    from skimage import data
    from sklearn.datasets import load_sample_images

    arrays = [data.coffee(), data.chelsea(), data.rocket(), *load_sample_images().images]
    return [Image.fromarray(array) for array in arrays]


def people(count: int, size: int, seed: int) -> list[Image.Image]:
    """Place a photograph of a person at a random place, size, mirror and light on other photographs."""
    from skimage import data

    person, rng, back = Image.fromarray(data.astronaut()), random(seed), grounds()
    made = []
    for _ in range(count):
        image = back[int(rng.integers(len(back)))].resize((size, size))
        for _ in range(int(rng.integers(1, 3))):
            side = int(size * rng.uniform(0.45, 0.95))
            one = person.resize((side, side), Image.Resampling.BILINEAR)
            if rng.random() < 0.5:
                one = one.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            one = one.rotate(float(rng.uniform(-12, 12)), resample=Image.Resampling.BILINEAR)
            place = (int(rng.integers(-side // 8, size - side + side // 8 + 1)), int(rng.integers(0, size - side + 1)))
            image.paste(one, place)
        made.append(_light(image, rng))
    return made


def faces(count: int, size: int, seed: int) -> list[Image.Image]:
    """Crop a face with a little margin, as a face detector hands it on."""
    from skimage import data

    person, rng = Image.fromarray(data.astronaut()), random(seed)
    made = []
    for _ in range(count):
        half = float(rng.uniform(75, 110))
        x, y = 222 + float(rng.uniform(-12, 12)), 118 + float(rng.uniform(-12, 12))
        turned = person.rotate(float(rng.uniform(-15, 15)), center=(x, y), resample=Image.Resampling.BILINEAR)
        face = turned.crop((int(x - half), int(y - half), int(x + half), int(y + half))).resize((size, size))
        made.append(_light(face.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else face, rng))
    return made


def eyes(count: int, size: int, seed: int) -> list[Image.Image]:
    """Crop the surroundings of one eye out of `faces`."""
    rng = random(seed)
    made = []
    for face in faces(count, 256, seed + 1):
        side, x, y = 256 * 0.3, 256 * (0.33 + rng.uniform(-0.03, 0.03)), 256 * (0.42 + rng.uniform(-0.03, 0.03))
        made.append(
            face.crop((int(x - side / 2), int(y - side / 2), int(x + side / 2), int(y + side / 2))).resize((size, size))
        )
    return made


def chords(count: int, length: int, rate: int, seed: int) -> Array:
    """Synthesize `[count, length]` pieces of plucked chords, floats of -1 to 1."""
    rng, t = random(seed), np.arange(length) / rate
    out = np.zeros((count, length), np.float32)
    for row in out:
        for _ in range(int(rng.integers(2, 7))):
            hz, start = 440.0 * 2 ** ((int(rng.integers(40, 80)) - 69) / 12), float(rng.uniform(0, t[-1] * 0.8))
            after = np.clip(t - start, 0, None)
            tone = sum(np.sin(2 * np.pi * hz * k * after) / k**1.5 for k in range(1, 6))
            row += (tone * np.exp(-after * 2.5) * (t > start) * rng.uniform(0.1, 0.3)).astype(np.float32)
        row += rng.normal(0, 0.003, length).astype(np.float32)
    return np.clip(out, -1, 1)


def speech(seconds: float, rate: int, seed: int) -> Array:
    """Speak sentences with pauses and noise between them: floats of -1 to 1."""
    if shutil.which("espeak-ng") is None:
        sys.exit("error: espeak-ng is missing; install it: sudo apt-get install espeak-ng")
    rng, length = random(seed), 0
    parts: list[Array] = [np.zeros(rate // 2, np.float32)]
    while length < seconds * rate:
        voice = str(rng.choice(["en", "en-us", "en+f3", "en+m5", "de", "fr+f2"]))
        command = ["espeak-ng", "-v", voice, "-s", str(int(rng.integers(120, 200))), "--stdout"]
        said = subprocess.run([*command, str(rng.choice(SENTENCES))], capture_output=True, check=True).stdout
        parts += [
            _resampled(said, rate) * float(rng.uniform(0.3, 1.0)),
            np.zeros(int(rate * rng.uniform(0.3, 1.5)), np.float32),
        ]
        length += sum(len(part) for part in parts[-2:])
    sound = np.concatenate(parts)[: int(seconds * rate)]
    return (sound + rng.normal(0, 10 ** rng.uniform(-3.5, -1.8), len(sound))).astype(np.float32)


def files(count: int, seed: int) -> list[bytes]:
    """Read files of many kinds from this Python's own installation."""
    roots, by_kind = (Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))), dict[str, list[Path]]()
    for root in roots:
        for path in sorted(_walk(root)):
            by_kind.setdefault(path.suffix.lower(), []).append(path)
    rng, kinds = random(seed), sorted(kind for kind, paths in by_kind.items() if kind and len(paths) >= 3)
    chosen = [by_kind[kind][int(rng.integers(len(by_kind[kind])))] for kind in rng.choice(kinds, count)]
    return [path.read_bytes() for path in chosen]


def _walk(root: Path) -> Iterator[Path]:
    for path in root.rglob("*"):
        if path.is_file() and 64 <= path.stat().st_size <= 4 * 1024**2 and "__pycache__" not in path.parts:
            yield path


def _light(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    array = np.asarray(image, np.float32) * rng.uniform(0.6, 1.2) + rng.normal(0, 3, (*image.size[::-1], 1))
    return Image.fromarray(np.clip(array, 0, 255).astype(np.uint8))


def _resampled(data: bytes, rate: int) -> Array:
    from scipy.signal import resample_poly

    with wave.open(io.BytesIO(data)) as file:
        own, raw = file.getframerate(), file.readframes(1 << 30)
    return np.asarray(resample_poly(np.frombuffer(raw, np.int16) / 32768.0, rate, own), np.float32)
