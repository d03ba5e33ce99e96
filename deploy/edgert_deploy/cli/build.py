"""`edgert build`: one model in, one checked and signed bundle out."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from edgert.bundle.expiry import time_text
from edgert.bundle.rules import Classify, Ctc, Detect, Preprocess
from edgert.bundle.signal_rules import Series, Sound, check_smoothing
from edgert.bundle.signing import read_signing_key
from edgert.bundle.text_rules import Embed, Text
from edgert.cli.number import Number
from edgert.cli.output import emit, json_option
from edgert.errors import ConfigInvalid
from edgert.processing.preprocessors import InputRule
from edgert.toml_file import about
from edgert_deploy.cli.shared import build_output
from edgert_deploy.cli.shared.build_progress import BuildProgress
from edgert_deploy.cli.shared.options import inventory_option, profiles_option
from edgert_deploy.cli.shared.types import FilePath, NewBundlePath, ProfileName
from edgert_deploy.common.keys import key_paths, keys_dir
from edgert_deploy.common.quantities import expiry_from, size_text
from edgert_deploy.devices.inventory import Inventory
from edgert_deploy.devices.profiles import DeviceProfile, load_profile
from edgert_deploy.packager.accuracy.golden_samples import SAMPLES as HOLDOUT_SAMPLES_MIN
from edgert_deploy.packager.accuracy.metrics import NAMES as METRICS
from edgert_deploy.packager.build_cache import default_cache
from edgert_deploy.packager.builders.folded_preprocessing import folded
from edgert_deploy.packager.candidates.choice import Choice
from edgert_deploy.packager.candidates.measure import MeasureHere, MeasureOn, Measurer
from edgert_deploy.packager.model_file import SUFFIX, read_model_file
from edgert_deploy.packager.new_model_file import name_from, write_model_file
from edgert_deploy.packager.pack import build_bundle
from edgert_deploy.packager.processes.work_folder import work_folder
from edgert_deploy.packager.request import BUDGET, BuildRequest
from edgert_deploy.packager.samples.processing import OutputRule, read_classify, read_postprocess, read_preprocess
from edgert_deploy.packager.samples.samples import load_samples
from edgert_deploy.packager.samples.streams import read_state
from edgert_deploy.packager.sources.formats.convert import Conversion, read_inputs
from edgert_deploy.packager.sources.onnx_graph.bucket_axis import read_buckets
from edgert_deploy.packager.sources.source_model import SourceModel, load_source

TEXT_LETTERS_MAX = 10_000
DOWNGRADE_EXPIRES = "30d"  # unless given: one that is never over could be replayed for ever
CALIBRATION_SAMPLES_MIN = 10
FILE = FilePath(path_type=Path)


def _read_model_argument(ctx: click.Context, param: click.Parameter, path: Path) -> Path:
    """Make the keys of a model file the defaults of the options, and return its model."""
    if ctx.resilient_parsing:
        return path
    if not path.exists():
        raise ConfigInvalid(
            f"there is no {path}: give a model, or its model file, which edgert build --init MODEL writes"
        )
    if path.suffix != SUFFIX:
        return path
    values = read_model_file(path)
    ctx.default_map = {**(ctx.default_map or {}), **values}
    return Path(values["model"])


@click.command()
@click.argument("model", type=FILE, is_eager=True, callback=_read_model_argument)
@click.option("--init", is_flag=True, help="Write MODEL's model file, with what the model tells, and build nothing.")
@click.option("--force", is_flag=True, help="With --init: overwrite a model file that exists.")
@click.option(
    "--calibration",
    type=FILE,
    help="Samples to quantize with: .npz, .npy, a folder of .npy, images, sound, series or texts, or module:function.",
)
@click.option("--holdout", type=FILE, help="Samples to judge by, none of them used for training.")
@click.option(
    "--allow-overlap", is_flag=True, help="Accept hold-out samples that are calibration samples: the gate proves less."
)
@click.option("--target", "targets", multiple=True, type=ProfileName(), help="A device profile. May be repeated.")
@click.option("--out", type=NewBundlePath(), help="The bundle to write [default: NAME.edgert].")
@click.option("--name", help="The model's name on devices [default: the file's].")
@click.option(
    "--release",
    type=click.IntRange(1, 2**53 - 1),
    default=1,
    show_default=True,
    help="The release's number; it grows with every deployment.",
)
@click.option(
    "--downgrade-from",
    type=click.IntRange(2, 2**53 - 1),
    metavar="RELEASE",
    help="Let devices go back to this bundle from releases up to RELEASE. It expires in 30 days, unless --expires is given.",
)
@click.option(
    "--expires",
    default="",
    metavar="TIME",
    help="When the bundle expires: 90d, 12h, 2027-02-19 (UTC). Devices install it until then.",
)
@click.option("--key", type=FILE, help="Private key to sign with [default: default.key.pem of your keys].")
@click.option(
    "--metric",
    default="auto",
    show_default=True,
    help=f"The figure that the accuracy gate compares: {', '.join(METRICS)} or module:function.",
)
@click.option(
    "--max-drop",
    type=Number(0),
    default=0.01,
    show_default=True,
    help="The most that an artifact may lose, in the metric's unit.",
)
@click.option("--max-class-drop", type=Number(0), help="The most that any class or slice may lose.")
@click.option(
    "--precision",
    type=click.Choice(["auto", "int8", "fp16", "fp32"]),
    help="The precision for all targets [default: each profile's own]; auto takes the fastest of int8, fp16, fp32 that passes.",
)
@click.option(
    "--engines",
    type=click.Choice(["all", "first"]),
    default="all",
    show_default=True,
    help="The engines of a profile to build for.",
)
@click.option("--with-reference", is_flag=True, help="Add FP32 artifacts that devices compare live answers with.")
@click.option(
    "--preprocess",
    type=FILE,
    help="The rule that turns images, signals or text into the model's input: imagenet, yolo or a .toml.",
)
@click.option("--fold-preprocess", is_flag=True, help="Make preprocessing part of the model: it takes UINT8 frames.")
@click.option("--postprocess", type=FILE, help="The rule that turns the model's outputs into answers: yolo or a .toml.")
@click.option("--labels", type=FILE, help="Names of the classes, one a line.")
@click.option("--licence", default="", help="The model's licence, for those who inspect the bundle.")
@click.option("--notes", default="", help="Notes for the same readers: the origin of the data, what changed.")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="NAME=SHAPE",
    help="The lengths of an input's axes, if the model leaves them open or fixes others: images=1,3,640,640, ids=int64:1,128.",
)
@click.option(
    "--buckets",
    metavar="AXIS=SIZES",
    help="Keep one axis open, and build for some of its lengths: tokens=32,64,128. Devices pad to the next one.",
)
@click.option(
    "--pad",
    "pads",
    multiple=True,
    metavar="INPUT=NUMBER",
    help="With --buckets: the number that pads an input [default: 0].",
)
@click.option("--convert-with", metavar="PYTHON", help="The Python that has Keras or PyTorch [default: this one].")
@profiles_option
@click.option(
    "--recipe",
    default="",
    metavar="NAME",
    help="Quantize with this recipe only, in engines that have it: min-max, percentile, ... [default: try them in turn].",
)
@click.option(
    "--budget",
    type=click.IntRange(0, 1000),
    default=BUDGET,
    show_default=True,
    metavar="BUILDS",
    help="How many artifacts to build in search of the fewest layers in float if INT8 does not pass; 0: no search.",
)
@click.option("--measure", is_flag=True, help="Time the candidates on this machine; the fastest that passes is packed.")
@click.option("--measure-on", metavar="SELECTOR", help="Time the candidates on a device of the inventory.")
@inventory_option
@click.option("--no-cache", is_flag=True, help="Build all artifacts anew, and keep none for the next build.")
@click.option(
    "--jobs",
    type=click.IntRange(0, 64),
    default=0,
    help="Artifacts that are built at once [default: as many as cores and memory allow].",
)
@json_option
def build(
    model: Path, init: bool, force: bool, out: Path | None, key: Path | None, as_json: bool, **given: Any
) -> None:
    """Build, check and sign a bundle of MODEL for one or more targets.

    MODEL is a model file (.toml) that names the model and sets options; options given here override it. Or it is the
    model itself: ONNX; TFLite, for TFLite targets; Keras (.keras, .h5, a SavedModel) or PyTorch (.pt2 of torch.export,
    TorchScript .pt), which edgert[keras] or edgert[torch] convert to ONNX.

    Exits with 3 if an artifact loses more accuracy than --max-drop, and writes no bundle then. 4: the model, the
    samples or an option cannot be used. 10: an engine cannot take the model. 11: a builder's tool failed, or an engine
    crashed.

    \b
    Examples:
      edgert build --init digits.onnx                 # writes digits.toml
      edgert build digits.toml
      edgert build digits.toml --release 2 --target raspberry-pi-5 --measure-on kitchen
      edgert build digits.onnx --calibration cal.npz --holdout hold.npz --target raspberry-pi-4
      edgert build yolo.onnx --calibration cal.npz --holdout hold.npz --target raspberry-pi-5 --postprocess yolo \\
          --metric map --precision auto

    \b
    The figures of the accuracy gate (--metric):
      auto    the first that fits the hold-out and the model: map, cer, top1, decisions.
      top1    top-1 with labels; without, how often both name the same class.
      top5    whether the right class is among the first five; needs labels.
      map     a detector's mean average precision; needs --postprocess and `boxes` in the hold-out.
      wer     1 - the word error rate; needs --postprocess with [ctc], and texts in the hold-out.
      cer     1 - the character error rate; needs the same.
      window_f1, event_f1   F1 of the answered classes, by window or by event; needs labels and [classify].
      decisions  classes, boxes, texts, ... that an app reads from each output, compared with FP32's; the worst output.
      cosine  the mean cosine of the artifact's outputs to FP32's, of the worst output.
      module:function   your own, called with (outputs, inputs, labels), higher is better.

    Targets: see edgert profiles.
    """
    buckets = read_buckets(given["buckets"], given["pads"])
    conversion = Conversion(given["convert_with"] or sys.executable, read_inputs(given["inputs"]), buckets)
    if init:
        kept = {key: given[key] for key in ("inputs", "buckets", "pads")}
        targets = given["targets"] or sorted({device.profile for device in given["inventory"].devices()})
        with work_folder():
            path = write_model_file(load_source(model, conversion), force, kept, targets)
        # A path of this machine: the model file, which a team shares, does not hold it.
        again = f" --convert-with {given['convert_with']}" if given["convert_with"] else ""
        emit({"model_file": str(path)}, f"{path}: edit it, then run edgert build {path}{again}", as_json)
        return
    ctx = click.get_current_context()
    _check_given(ctx)
    profiles = tuple(load_profile(target, given["profiles_dir"]) for target in given["targets"])
    signing_key = read_signing_key(key or key_paths(keys_dir(), "default")[0])
    with work_folder():
        request = _request(load_source(model, conversion), profiles, given)
    counts = {p.name: len(p.engines) if request.engines == "all" else 1 for p in profiles}
    headed = False
    with BuildProgress(counts) as progress:

        def report(choice: Choice) -> None:
            nonlocal headed
            progress.done(choice.profile.name)
            if not as_json:
                table = build_output.rows(choice, request.source.size_bytes)
                # A build that cannot begin prints no heading.
                progress.print(table if headed else f"{build_output.HEADING}\n{table}")
                headed = True

        out = out or NewBundlePath().convert(f"{request.model}.edgert", None, ctx)
        result = build_bundle(request, signing_key, out, progress, report)
    times = f"{build_output.times(result.choices)}\n" if any(choice.timings for choice in result.choices) else ""
    downgrade = f" (a downgrade from releases up to {request.downgrade_from})" if request.downgrade_from else ""
    expires = f", expires {request.expires}" if request.expires else ""
    size = size_text(result.size_bytes)
    text = f"{times}{out}: {size}, release {request.release}{downgrade}{expires}, signed by {result.key_id}"
    emit(build_output.as_json(result, request), text, as_json)


def _check_given(ctx: click.Context) -> None:
    """Refuse a build without samples or targets: click cannot, as the model file may give them."""
    missing = [f"--{name}" for name in ("calibration", "holdout") if ctx.params[name] is None]
    if not ctx.params["targets"]:
        missing.append("--target")
    if missing:
        raise click.UsageError(
            f"missing {', '.join(missing)}: give the options, or write a model file with edgert build --init MODEL"
        )
    if 0 < (ctx.params["downgrade_from"] or 0) <= ctx.params["release"]:
        raise click.UsageError(
            f"release {ctx.params['release']} is not a downgrade from {ctx.params['downgrade_from']}: "
            "give the highest release that devices may go back from"
        )
    if ctx.params["measure"] and ctx.params["measure_on"]:
        raise click.UsageError("give either --measure or --measure-on")


def _request(source: SourceModel, profiles: tuple[DeviceProfile, ...], given: dict[str, Any]) -> BuildRequest:
    """Read the files that the options name, and return the request."""
    model = given["name"] or name_from(source.path)
    source, before, state_id = _input_rule(source, given)
    after = _output_rule(source, before, given)
    for name in ("licence", "notes"):
        if len(given[name]) > TEXT_LETTERS_MAX:
            raise ConfigInvalid(f"--{name} has {len(given[name])} letters; at most {TEXT_LETTERS_MAX}: shorten it")
    reading = partial(
        load_samples,
        source=source,
        preprocess=before,
        class_names=after.labels if isinstance(after, Classify | Detect) else (),
        transcripts=isinstance(after, Ctc),
    )
    now_s, expires = time.time(), given["expires"] or (DOWNGRADE_EXPIRES if given["downgrade_from"] else "")
    same = (
        *("release", "max_drop", "max_class_drop", "engines", "metric", "allow_overlap", "licence"),
        *("notes", "precision", "with_reference", "budget", "recipe", "jobs"),
    )
    return BuildRequest(
        source=source,
        calibration=reading(given["calibration"], at_least=CALIBRATION_SAMPLES_MIN),
        holdout=reading(given["holdout"], at_least=HOLDOUT_SAMPLES_MIN),
        targets=profiles,
        model=model,
        expires=expiry_from(expires, now_s) if expires else "",
        downgrade_from=given["downgrade_from"] or 0,
        signed_at=time_text(now_s) if expires else "",
        preprocess=before,
        state_id=state_id,
        classify=after if isinstance(after, Classify) else None,
        detect=after if isinstance(after, Detect) else None,
        ctc=after if isinstance(after, Ctc) else None,
        embed=after if isinstance(after, Embed) else None,
        measure=_measurer(given["measure"], given["measure_on"], given["inventory"], profiles),
        cache=None if given["no_cache"] else default_cache(),
        **{name: given[name] for name in same},
    )


def _input_rule(source: SourceModel, given: dict[str, Any]) -> tuple[SourceModel, InputRule | None, str]:
    """Return the model with its state and folded preprocessing, the rule for its input, and `state_id`."""
    before, state_id = None, ""
    if given["preprocess"] is not None:
        state, state_id = read_state(given["preprocess"], source)
        source = replace(source, state=state)
        before = read_preprocess(given["preprocess"], source)
    if source.buckets is not None and (source.state or not isinstance(before, Text | None)):
        raise ConfigInvalid(
            "--buckets keeps an axis open, and only text has a --preprocess for that: give the axis a length with --input"
        )
    if given["fold_preprocess"]:
        if not isinstance(before, Preprocess):
            raise ConfigInvalid(
                "--fold-preprocess folds in a rule for images: give --preprocess imagenet, yolo or a file"
            )
        source, before = folded(source, before)
    return source, before, state_id


def _output_rule(source: SourceModel, before: InputRule | None, given: dict[str, Any]) -> OutputRule | None:
    """Return the rule that makes answers of the model's outputs."""
    after: OutputRule | None = None
    if given["postprocess"] is not None:
        after = read_postprocess(given["postprocess"], source, given["labels"], before)
        if source.buckets is not None and isinstance(after, Detect):
            raise ConfigInvalid(
                "--buckets keeps an axis open, and a detector's boxes need fixed sizes: leave one of them out"
            )
    elif given["labels"] is not None:
        after = read_classify(given["labels"], source)
    if isinstance(after, Classify) and after.smooth is not None:
        with about(given["postprocess"]):
            check_smoothing(after, before if isinstance(before, Sound | Series) else None)
    return after


def _measurer(
    here: bool, selector: str | None, inventory: Inventory, profiles: tuple[DeviceProfile, ...]
) -> Measurer | None:
    if selector is not None:
        return MeasureOn(inventory.device(selector), profiles)
    return MeasureHere() if here else None
