"""`edgert build`: one model in, one checked and signed bundle out."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import click

from edgert.bundle.rules import Classify, Detect
from edgert.bundle.signing import read_signing_key
from edgert.errors import ConfigInvalid
from edgert_deploy.cli.options import inventory_option, json_option, profiles_option
from edgert_deploy.cli.output import columns
from edgert_deploy.cli.progress import BuildProgress
from edgert_deploy.cli.types import Duration, NewBundlePath
from edgert_deploy.common.keys import key_paths, keys_dir
from edgert_deploy.common.quantities import expiry_from, size_text
from edgert_deploy.devices.inventory import find_inventory
from edgert_deploy.devices.profiles import DeviceProfile, load_profile
from edgert_deploy.packager.accuracy.golden_samples import SAMPLES as HOLDOUT_SAMPLES_MIN
from edgert_deploy.packager.build_cache import default_cache
from edgert_deploy.packager.builders.folded_preprocessing import folded
from edgert_deploy.packager.candidates import Candidate
from edgert_deploy.packager.choice import Choice
from edgert_deploy.packager.measure import MeasureHere, MeasureOn, Measurer
from edgert_deploy.packager.pack import BuildResult, build_bundle
from edgert_deploy.packager.request import BuildRequest
from edgert_deploy.packager.samples.processing import read_classify, read_postprocess, read_preprocess
from edgert_deploy.packager.samples.samples import load_samples
from edgert_deploy.packager.sources.convert import Conversion, read_inputs
from edgert_deploy.packager.sources.source_model import load_source

COLUMNS = (
    ("target", 18),
    ("engine", 11),
    ("precision", 9),
    ("size", 20),
    ("metric", 14),
    ("FP32", 7),
    ("artifact", 8),
    ("diff", 8),
    ("gate", 4),
)
WORDS_LETTERS_MAX = 10_000
CALIBRATION_SAMPLES_MIN = 10
FILE = click.Path(path_type=Path)


@click.command()
@click.argument("model", type=FILE)
@click.option(
    "--calibration",
    type=FILE,
    required=True,
    help="Samples to quantise with: .npz, a folder of .npy or of images, or module:function.",
)
@click.option("--holdout", type=FILE, required=True, help="Samples to judge by, none of them trained on.")
@click.option("--target", "targets", multiple=True, required=True, help="A device profile; may be given again.")
@click.option("--out", type=NewBundlePath(), required=True, help="The bundle to write.")
@click.option(
    "--release", type=click.IntRange(1, 2**53 - 1), default=1, show_default=True, help="Must rise with every deploy."
)
@click.option("--name", help="The model's name on devices (default: that of the file).")
@click.option("--key", type=FILE, help="Private key to sign with (default: default.key.pem of the user's keys).")
@click.option(
    "--max-drop",
    type=click.FloatRange(0),
    default=0.01,
    show_default=True,
    help="Accuracy that an artifact may lose, in the metric's own unit.",
)
@click.option(
    "--max-class-drop",
    type=click.FloatRange(0),
    help="Accuracy that any class or slice may lose (default: only the whole is judged).",
)
@click.option(
    "--metric",
    default="auto",
    show_default=True,
    help="What the gate compares: auto, top1, top5, map, cosine or module:function; see below.",
)
@click.option("--allow-overlap", is_flag=True, help="Accept hold-out samples that are calibration samples too.")
@click.option("--licence", default="", help="The model's licence, for those who inspect the bundle.")
@click.option("--notes", default="", help="What else they should know: where the data came from, what changed.")
@click.option("--downgrade", is_flag=True, help="Sign a way back: devices take this release after a higher one, too.")
@click.option(
    "--expires", default="", metavar="TIME", help="Devices install it until then: 90d, 12h, 2027-02-19 (UTC)."
)
@click.option(
    "--precision",
    type=click.Choice(["auto", "int8", "fp16", "fp32"]),
    help="For all targets (default: each profile's own); auto takes the first of int8, fp16, fp32 that passes.",
)
@click.option(
    "--engines",
    type=click.Choice(["all", "first"]),
    default="all",
    show_default=True,
    help="Engines of a profile's engine preference to build for.",
)
@click.option(
    "--with-reference", is_flag=True, help="Add FP32 artifacts that devices may compare live answers with (shadow)."
)
@click.option(
    "--preprocess", type=FILE, help="How devices turn images into what the model takes: imagenet, yolo or a .toml."
)
@click.option(
    "--fold-preprocess",
    is_flag=True,
    help="Make scale, mean, std and layout part of the model, which is faster in OpenVINO; not for TFLite.",
)
@click.option("--postprocess", type=FILE, help="What devices make of the model's outputs: yolo or a .toml.")
@click.option("--labels", type=FILE, help="Names of the classes, one a line.")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="NAME=SHAPE",
    help="TorchScript: x=1,3,224,224 or ids=int64:1,128; for each.",
)
@click.option("--convert-with", metavar="PYTHON", help="The Python that has Keras or PyTorch (default: this one).")
@profiles_option
@click.option(
    "--budget",
    "budget_s",
    type=Duration(),
    default="10m",
    show_default=True,
    help="How long to look for the fewest layers in float where INT8 does not pass: 90s, 10m, 1h; 0 does not look.",
)
@click.option("--measure", is_flag=True, help="Time the candidates on this machine, and take the fastest that passes.")
@click.option("--measure-on", metavar="SELECTOR", help="The same on a device of the inventory, over its link.")
@inventory_option
@click.option("--no-cache", is_flag=True, help="Build all artifacts anew, and keep none for the next build.")
@click.option(
    "--jobs",
    type=click.IntRange(0, 64),
    default=0,
    help="Artifacts built at once (default: as cores and memory allow).",
)
@json_option
def build(
    model: Path,
    calibration: Path,
    holdout: Path,
    targets: tuple[str, ...],
    out: Path,
    release: int,
    name: str | None,
    key: Path | None,
    max_drop: float,
    max_class_drop: float | None,
    metric: str,
    allow_overlap: bool,
    licence: str,
    notes: str,
    downgrade: bool,
    expires: str,
    precision: Any,
    engines: Any,
    with_reference: bool,
    preprocess: Path | None,
    fold_preprocess: bool,
    postprocess: Path | None,
    labels: Path | None,
    inputs: tuple[str, ...],
    convert_with: str | None,
    profiles_dir: Path | None,
    budget_s: float,
    measure: bool,
    measure_on: str | None,
    inventory_file: Path | None,
    no_cache: bool,
    jobs: int,
    as_json: bool,
) -> None:
    """Build, check and sign a bundle of MODEL for one or more targets.

    MODEL is ONNX; or TFLite, for TFLite targets; or of Keras (.keras, .h5, a SavedModel) or PyTorch (.pt2 of
    torch.export, TorchScript .pt), which edgert[keras] or edgert[torch] convert to ONNX.

    Exits with 3 where an artifact loses more accuracy than --max-drop; no bundle is written then. 4: the model,
    the samples or an option cannot be used. 10: an engine cannot take the model. 11: a builder's tool failed.

    \b
    Examples:
      edgert build digits.onnx --calibration cal.npz --holdout hold.npz --target raspberry-pi-4 --out digits.edgert
      edgert build digits.onnx --calibration cal.npz --holdout hold.npz --target intel-nuc \\
          --target jetson-orin-nano --release 2 --labels labels.txt --preprocess preprocess.toml --out digits-2.edgert
      edgert build old.onnx --calibration cal.npz --holdout hold.npz --target intel-nuc --release 1 --downgrade --out back.edgert
      edgert build yolo.onnx --calibration cal.npz --holdout hold.npz --target raspberry-pi-5 --postprocess yolo \\
          --metric map --precision auto --measure-on kitchen --out yolo.edgert

    \b
    What the gate compares (--metric):
      auto    with `labels` in the hold-out: top-1 of the artifact against the FP32 source's. Without: how often
              both name the same class, where the one output is [N, C] and holds class scores, which is so with
              --labels, or where its rows are probabilities; else cosine.
      top1    top-1 with labels; without, how often both name the same class.
      top5    the right class is among the first five; needs labels.
      map     a detector's mean average precision; needs --postprocess and `boxes` in the hold-out.
      cosine  the mean cosine of the artifact's outputs to FP32's, of the output that fares worst.
      module:function   your own, called with (outputs, inputs, labels), higher being better.

    Targets: see edgert profiles.
    """
    profiles = tuple(load_profile(target, profiles_dir) for target in targets)
    signing_key = read_signing_key(key or key_paths(keys_dir(), "default")[0])
    source = load_source(model, Conversion(convert_with or sys.executable, read_inputs(inputs)))
    before = None if preprocess is None else read_preprocess(preprocess, source)
    if fold_preprocess:
        if before is None:
            raise ConfigInvalid("--fold-preprocess has nothing to fold in: give --preprocess imagenet, yolo or a file")
        source, before = folded(source, before)
    after: Classify | Detect | None = None
    if postprocess is not None:
        after = read_postprocess(postprocess, source, labels)
    elif labels is not None:
        after = read_classify(labels, source)
    names = after.labels if after is not None else ()
    request = BuildRequest(
        source=source,
        calibration=load_samples(calibration, source, before, names, at_least=CALIBRATION_SAMPLES_MIN),
        holdout=load_samples(holdout, source, before, names, at_least=HOLDOUT_SAMPLES_MIN),
        targets=profiles,
        model=name or name_from(model),
        release=release,
        max_drop=max_drop,
        max_class_drop=max_class_drop,
        engines=engines,
        metric=metric,
        allow_overlap=allow_overlap,
        downgrade=downgrade,
        expires=expiry_from(expires, time.time()) if expires else "",
        licence=_words("licence", licence),
        notes=_words("notes", notes),
        precision=precision,
        with_reference=with_reference,
        preprocess=before,
        classify=after if isinstance(after, Classify) else None,
        detect=after if isinstance(after, Detect) else None,
        budget_s=budget_s,
        measure=_measurer(measure, measure_on, inventory_file, profiles),
        cache=None if no_cache else default_cache(),
        jobs=jobs,
    )
    headed = False
    with BuildProgress({p.name: len(p.engines) if engines == "all" else 1 for p in profiles}) as progress:

        def report(choice: Choice) -> None:
            nonlocal headed
            progress.done(choice.profile.name)
            if not as_json:
                if not headed:  # a build that cannot begin prints no table
                    progress.print(lambda: _print_cells(heading for heading, _ in COLUMNS))
                headed = True
                progress.print(lambda: _print_rows(choice, source.size_bytes))

        result = build_bundle(request, signing_key, out, progress, report)
    if not as_json and any(choice.timings for choice in result.choices):
        _print_times(result)
    if as_json:
        click.echo(json.dumps(_as_json(result, request)))
    else:
        click.echo(
            f"{result.path}: {size_text(result.size_bytes)}, release {release}{' (a downgrade)' if downgrade else ''}{f', expires {request.expires}' if request.expires else ''}, signed by {result.key_id}"
        )


def name_from(path: Path) -> str:
    """A model name made of the file's: lower case, everything else that is not allowed as `-`."""
    return re.sub(r"[^a-z0-9_-]+", "-", path.stem.lower()).strip("-")[:63]


def _measurer(
    here: bool, device: str | None, inventory_file: Path | None, profiles: tuple[DeviceProfile, ...]
) -> Measurer | None:
    if here and device is not None:
        raise click.UsageError("give either --measure or --measure-on")
    if device is not None:
        return MeasureOn(find_inventory(inventory_file).device(device), profiles)
    return MeasureHere() if here else None


def _words(option: str, text: str) -> str:
    if len(text) > WORDS_LETTERS_MAX:
        raise ConfigInvalid(f"--{option} has {len(text)} letters; at most {WORDS_LETTERS_MAX}: shorten it")
    return text


def _print_rows(choice: Choice, source_size_bytes: int) -> None:
    for candidate in choice.packed:
        artifact, accuracy = candidate.artifact, candidate.result.accuracy
        _print_cells(
            (
                choice.profile.name,
                artifact.engine,
                artifact.kind,
                f"{size_text(candidate.size_bytes)} ({_compared(candidate.size_bytes, source_size_bytes)})",
                accuracy.metric,
                f"{accuracy.fp32:.4f}",
                f"{accuracy.artifact:.4f}",
                f"{0.0 - accuracy.drop:+.4f}",
                "pass" if candidate.passed else "FAIL",
            )
        )


def _print_times(result: BuildResult) -> None:
    """Every candidate of each target that was measured: does it pass, how fast is it, what became of it."""
    rows = [("target", "candidate", "on", "p50 ms", "threads", "gate", "")]
    for choice in result.choices:
        packed = {candidate.id: place for place, candidate in enumerate(choice.packed)}
        for candidate in choice.tried:
            timing = choice.timings.get(candidate.id)
            if not choice.timings or (candidate.id in packed and timing is None):
                continue
            time = f"{timing.p50_ms:.4f}" if timing and not timing.error else "-"
            note = (
                timing.error
                if timing and timing.error
                else ("first", "packed")[packed[candidate.id] > 0]
                if candidate.id in packed
                else ""
            )
            where, threads = (timing.where, str(timing.threads or "-")) if timing else ("-", "-")
            gate = "pass" if candidate.passed else "FAIL"
            rows.append((choice.profile.name, candidate.id, where, time, threads, gate, note))
    click.echo(columns(rows))


def _print_cells(cells: Any) -> None:
    click.echo("  ".join(cell.ljust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True)).rstrip())


def _compared(size_bytes: int, source_size_bytes: int) -> str:
    less, more = source_size_bytes / max(size_bytes, 1), size_bytes / max(source_size_bytes, 1)
    return f"{less:.1f}x less" if less >= 1 else f"{more:.1f}x more"


def _as_json(result: BuildResult, request: BuildRequest) -> dict[str, Any]:
    return {
        "bundle": str(result.path),
        "size_bytes": result.size_bytes,
        "digest": result.digest,
        "key_id": result.key_id,
        "model": request.model,
        "release": request.release,
        "downgrade": request.downgrade,
        "expires": request.expires or None,
        "warnings": list(result.warnings),
        "targets": [_target_as_json(choice, request.source.size_bytes) for choice in result.choices],
    }


def _target_as_json(choice: Choice, source_size_bytes: int) -> dict[str, Any]:
    """The target with the artifact that it serves first, and all of its artifacts beside it."""
    artifacts = [_candidate_as_json(candidate, source_size_bytes) for candidate in choice.packed]
    candidates = [
        {
            "artifact": c.id,
            "passed": c.passed,
            "drop": c.result.accuracy.drop,
            "size_bytes": c.size_bytes,
            **(vars(choice.timings[c.id]) if c.id in choice.timings else {}),
        }
        for c in choice.tried
    ]
    return {
        "target": choice.profile.name,
        **artifacts[0],
        "artifacts": artifacts,
        "left_out": [vars(one) for one in choice.left_out],
        "candidates": candidates,
    }


def _candidate_as_json(candidate: Candidate, source_size_bytes: int) -> dict[str, Any]:
    artifact, accuracy = candidate.artifact, candidate.result.accuracy
    return {
        "artifact": candidate.id,
        "engine": artifact.engine,
        "precision": artifact.kind,
        "float_layers": list(artifact.float_layers),
        "size_bytes": candidate.size_bytes,
        "source_size_bytes": source_size_bytes,
        "metric": accuracy.metric,
        "samples": accuracy.samples,
        "fp32": accuracy.fp32,
        "artifact_accuracy": accuracy.artifact,
        "drop": accuracy.drop,
        "max_drop": accuracy.max_drop,
        "judged_by": artifact.judged_by,
        "build_s": round(candidate.build_s, 3),
        "passed": candidate.passed,
    }
