"""The manifest: canonical bytes, and every name, reference and limit checked where it enters."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from edgert.bundle.manifest import FILES_MAX, Accuracy, ArtifactEntry, FileEntry, Manifest, TargetEntry
from edgert.bundle.rules import Classify, Ctc, Detect, Preprocess, Resize, Smooth
from edgert.errors import BundleError, NotCompatible
from edgert.tensors import TensorSpec

FILES = tuple(FileEntry(path, 10, "ab" * 32) for path in ("a/model.onnx", "golden/0.npy", "golden/a/0.npy"))
ARTIFACT = ArtifactEntry(
    id="a",
    engine="onnxruntime",
    precision="int8",
    entry="a/model.onnx",
    files=("a/model.onnx",),
    golden_outputs=("golden/a/0.npy",),
    golden_atol=(0.5,),
    accuracy=Accuracy("top1", 400, 0.99, 0.985, 0.01),
    tools={"onnx": "1.17"},
)
GOOD = Manifest(
    model="digits",
    release=3,
    inputs=(TensorSpec("image", "FP32", (-1, 1, 8, 8)),),
    outputs=(TensorSpec("scores", "FP32", (-1, 10)),),
    files=FILES,
    artifacts=(ARTIFACT,),
    targets=(TargetEntry("intel-nuc", ("x86_64",), ("a",)), TargetEntry("any", (), ("a",))),
    golden_inputs=("golden/0.npy",),
    source_sha256="cd" * 32,
    source_size_bytes=100,
    preprocess=Preprocess("image", 1 / 255, (0.5,), (0.25,), "nhwc"),
    classify=Classify("scores", ("zero", "one")),
    downgrade_from=4,
    expires="2027-02-19T08:00:00Z",
    signed_at="2026-11-21T08:00:00Z",
)


def test_a_manifest_is_read_back_unchanged() -> None:
    data = GOOD.to_bytes()
    assert Manifest.from_bytes(data) == GOOD
    assert Manifest.from_bytes(data).to_bytes() == data
    every = Classify("scores", ("zero", "one"), threshold=(0.5, 0.6), none=("one",))
    assert Manifest.from_bytes(replace(GOOD, classify=every).to_bytes()).classify == every
    plain = replace(GOOD, preprocess=None, classify=None, downgrade_from=0)
    assert Manifest.from_bytes(plain.to_bytes()) == plain


def test_the_bytes_of_a_manifest_are_canonical() -> None:
    data = GOOD.to_bytes()
    assert data == json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode()


def file(path: str, size: int = 1, sha256: str = "0" * 64) -> Manifest:
    return replace(GOOD, files=(*FILES, FileEntry(path, size, sha256)))


def artifact(**changes: Any) -> Manifest:
    return replace(GOOD, artifacts=(replace(ARTIFACT, **changes),))


def images(**changes: Any) -> Manifest:
    return replace(GOOD, preprocess=Preprocess("image", **{"colour": "gray", "decode": True, **changes}))


def detector(**changes: Any) -> Manifest:
    boxes = TensorSpec("boxes", "FP32", (-1, 5, 9))
    entry = replace(ARTIFACT, golden_outputs=ARTIFACT.golden_outputs * 2, golden_atol=(0.5, 0.5))
    return replace(
        GOOD, outputs=(*GOOD.outputs, boxes), artifacts=(entry,), detect=Detect(**{"boxes": "boxes", **changes})
    )


def test_rules_for_images_and_boxes_are_read_back_unchanged() -> None:
    for manifest in (images(resize=Resize("letterbox", 8, 8)), detector(labels=("a",))):
        assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_the_rules_of_a_manifest_are_optional() -> None:
    value = json.loads(images().to_bytes())
    value["preprocess"] = {"input": "image"}
    del value["detect"], value["classify"]
    read = Manifest.from_bytes(json.dumps(value).encode())
    assert (read.preprocess, read.classify, read.detect) == (Preprocess("image"), None, None)


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("preprocess", {"input": "image", "mirror": True}),
        ("preprocess", {"input": "image", "resize": {"rule": "crop", "height": 8, "width": 8, "mirror": 1}}),
        ("sound", {"mirror": 1}),
        ("series", {"mirror": 1}),
        ("text", {"mirror": 1}),
        ("embed", {"mirror": 1}),
        ("classify", {"output": "scores", "smooth": {"mirror": 1}}),
        ("classify", {"output": "scores", "mirror": 1}),
        ("ctc", {"output": "scores", "mirror": 1}),
        ("detect", {"boxes": "scores", "mirror": 1}),
        ("buckets", {"axis": "tokens", "mirror": 1}),
        ("state", [{"input": "image", "mirror": 1}]),
    ],
)
def test_an_unknown_key_of_a_rule_is_refused_because_it_could_change_answers(key: str, rule: object) -> None:
    value = {**json.loads(GOOD.to_bytes()), key: rule}
    with pytest.raises(BundleError, match=r"unknown key 'mirror'.*update edgert on the device"):
        Manifest.from_bytes(json.dumps(value).encode())


FAULTS: list[tuple[str, Callable[[], Manifest]]] = [
    ("upper-case model", lambda: replace(GOOD, model="Digits")),
    ("slash in model", lambda: replace(GOOD, model="a/b")),
    ("no model", lambda: replace(GOOD, model="")),
    ("newline in model", lambda: replace(GOOD, model="a\n")),
    ("release 0", lambda: replace(GOOD, release=0)),
    ("release too large", lambda: replace(GOOD, release=2**53)),
    ("no inputs", lambda: replace(GOOD, inputs=(), golden_inputs=())),
    ("no targets", lambda: replace(GOOD, targets=())),
    ("reference that is not there", lambda: replace(GOOD, targets=(replace(GOOD.targets[0], reference="other"),))),
    ("no artifacts", lambda: replace(GOOD, artifacts=())),
    ("parent folder", lambda: file("a/../b")),
    ("two dots", lambda: file("a..b")),
    ("absolute", lambda: file("/etc/passwd")),
    ("hidden", lambda: file(".ssh/id")),
    ("backslash", lambda: file("a\\b")),
    ("zero byte", lambda: file("a\0b")),
    ("newline", lambda: file("a\n")),
    ("empty part", lambda: file("a//b")),
    ("long name", lambda: file("a" * 101)),
    ("deep name", lambda: file("/".join("abcdefghi"))),
    ("not ASCII", lambda: file("ä")),
    ("negative size", lambda: file("b", -1)),
    ("huge size", lambda: file("b", 2**40)),
    ("no hash", lambda: file("b", 1, "xyz")),
    ("same file twice", lambda: file("a/model.onnx")),
    (
        "too many files",
        lambda: replace(GOOD, files=(*FILES, *(FileEntry(f"f{i}", 0, "0" * 64) for i in range(FILES_MAX)))),
    ),
    ("artifact id", lambda: artifact(id="../a")),
    ("entry not among files", lambda: artifact(entry="golden/0.npy")),
    ("file not in the bundle", lambda: artifact(files=("a/model.onnx", "b"))),
    ("golden file missing", lambda: artifact(golden_outputs=("nowhere",))),
    ("a tolerance too few", lambda: artifact(golden_atol=())),
    ("negative tolerance", lambda: artifact(golden_atol=(-1.0,))),
    ("tolerance not finite", lambda: artifact(golden_atol=(float("inf"),))),
    ("tolerance NaN", lambda: artifact(golden_atol=(float("nan"),))),
    ("artifact twice", lambda: replace(GOOD, artifacts=(ARTIFACT, ARTIFACT))),
    ("target twice", lambda: replace(GOOD, targets=(*GOOD.targets, GOOD.targets[0]))),
    ("target without artifact", lambda: replace(GOOD, targets=(TargetEntry("x", (), ()),))),
    ("target of another artifact", lambda: replace(GOOD, targets=(TargetEntry("x", (), ("b",)),))),
    ("golden input missing", lambda: replace(GOOD, golden_inputs=())),
    ("preprocess of another input", lambda: replace(GOOD, preprocess=Preprocess("x"))),
    ("preprocess layout", lambda: replace(GOOD, preprocess=Preprocess("image", layout="chwn"))),
    ("std 0", lambda: replace(GOOD, preprocess=Preprocess("image", std=(0.0,)))),
    ("images of three colours for one channel", lambda: images(colour="rgb")),
    ("images for another size", lambda: images(resize=Resize("stretch", 9, 8))),
    ("unknown resize rule", lambda: images(resize=Resize("squeeze", 8, 8))),
    ("unknown filter", lambda: images(resize=Resize("stretch", 8, 8, filter="best"))),
    ("shorter side below the model", lambda: images(resize=Resize("crop", 8, 8, shortest_side=7))),
    ("pad value 256", lambda: images(resize=Resize("letterbox", 8, 8, pad_value=256))),
    ("infinite scale", lambda: images(scale=float("inf"))),
    ("unknown colour", lambda: images(colour="cmyk")),
    ("detection in another output", lambda: detector(boxes="x")),
    ("detection in scores", lambda: replace(GOOD, detect=Detect("scores"))),
    ("too few values a box", lambda: detector(objectness=True)),
    ("threshold 2", lambda: detector(score_threshold=2.0)),
    ("no detections", lambda: detector(detections_max=0)),
    ("unknown box format", lambda: detector(box_format="polar")),
    (
        "an output named as one that is added",
        lambda: replace(
            detector(),
            outputs=(TensorSpec("detected_boxes", "FP32", (-1, 5, 9)),),
            detect=Detect("detected_boxes"),
            classify=None,
        ),
    ),
    ("classify of another output", lambda: replace(GOOD, classify=Classify("x", ()))),
    (
        "smoothing without windows",
        lambda: replace(GOOD, classify=Classify("scores", ("zero", "one"), smooth=Smooth("mean", 3))),
    ),
    ("ctc of class scores without steps", lambda: replace(GOOD, ctc=Ctc("scores", tuple("0123456789")))),
    ("top 0", lambda: replace(GOOD, classify=Classify("scores", (), top_k=0))),
]


@pytest.mark.parametrize("make", [fault[1] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_a_manifest_with_a_value_that_is_not_allowed_is_refused(make: Callable[[], Manifest]) -> None:
    with pytest.raises(BundleError):
        make()


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"null", b"\xff", b'{"format":1}', b'{"format":2}', b"[" * 100_000, b'{"format":1,"model":[]}'],
)
def test_bytes_that_are_not_a_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(BundleError):
        Manifest.from_bytes(data)


def test_a_value_of_another_type_raises_only_bundle_error() -> None:
    value = json.loads(GOOD.to_bytes())
    wrongs: tuple[Any, ...] = (None, 5, -1, "text", [], [None], {}, True, [[[]]])
    for key in value:
        for wrong in wrongs:
            data = json.dumps({**value, key: wrong}).encode()
            try:
                Manifest.from_bytes(data)
            except BundleError:
                continue


def test_a_number_that_is_too_large_for_json_is_refused() -> None:
    with pytest.raises(BundleError):
        Manifest.from_bytes(GOOD.to_bytes().replace(b'"release":3', b'"release":1e999'))


def test_a_manifest_of_another_format_is_refused_with_the_advice_to_update_edgert() -> None:
    value = {**json.loads(GOOD.to_bytes()), "format": 2}
    with pytest.raises(BundleError, match="update edgert"):
        Manifest.from_bytes(json.dumps(value).encode())


def test_a_device_takes_the_target_of_its_profile_and_processor_only() -> None:
    assert GOOD.target_for("intel-nuc", "x86_64").artifacts == ("a",)
    assert GOOD.target_for("any", "riscv64").profile == "any"
    with pytest.raises(NotCompatible, match="aarch64"):
        GOOD.target_for("intel-nuc", "aarch64")
    with pytest.raises(NotCompatible, match=r"intel-nuc, any.*--target toaster"):
        GOOD.target_for("toaster", "x86_64")
