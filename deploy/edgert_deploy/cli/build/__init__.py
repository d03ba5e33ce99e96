"""`edgert build`: make a checked and signed bundle of a model."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from edgert.cli.output import emit, json_option
from edgert.errors import AccuracyTooLow, ConfigInvalid
from edgert_deploy.cli.build import output as build_output
from edgert_deploy.cli.build.options import FILE, BuildOptions, build_options
from edgert_deploy.cli.build.request import request_of
from edgert_deploy.cli.shared.option_groups import SectionedCommand, each_of, given_option, section
from edgert_deploy.cli.shared.types import NewBundlePath
from edgert_deploy.packager.candidates.choice import Choice
from edgert_deploy.packager.model_file import SUFFIX, read_model_file
from edgert_deploy.packager.new_model_file import write_model_file
from edgert_deploy.packager.pack import build_bundle
from edgert_deploy.packager.processes.work_folder import work_folder
from edgert_deploy.packager.sources.source_model import load_source

# --init uses these options. Keys of the model file replace all others.
_INIT_OPTIONS = {"inputs", "buckets", "pads", "targets", "convert_with", "profiles_dir", "inventory", "no_cache"}


def _read_model_argument(ctx: click.Context, param: click.Parameter, path: Path) -> Path:
    """Return the path of the model. The keys of a model file become the defaults of the options."""
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


@click.command(cls=SectionedCommand)
@click.argument("model", type=FILE, is_eager=True, callback=_read_model_argument)
@each_of(
    *section(
        "The model file",
        click.option(
            "--init", is_flag=True, help="Write a model file for MODEL, filled in from the model, and build nothing."
        ),
        click.option("--force", is_flag=True, help="With --init: overwrite an existing model file."),
    )
)
@build_options
@json_option
def build(model: Path, init: bool, force: bool, options: BuildOptions, as_json: bool) -> None:
    """Build, check and sign a bundle of MODEL for one or more targets.

    MODEL is a model file (.toml) that names the model and sets options; options on the command line override the model
    file. Or MODEL is the model itself: ONNX; TFLite, for TFLite targets; Keras (.keras, .h5, a SavedModel) or PyTorch
    (.pt2 of torch.export, TorchScript .pt), which edgert[keras] or edgert[torch] convert to ONNX.

    If an artifact loses more accuracy than --max-drop, the command writes no bundle, and the exit code is 3. The exit
    code is 4 if the model, the samples or an option cannot be used, 10 if an engine does not support the model, and 11
    if a tool of the build failed or an engine crashed.

    \b
    Examples:
      edgert build --init digits.onnx                 # writes digits.toml
      edgert build digits.toml
      edgert build digits.toml --release 2 --target raspberry-pi-5 --measure-on kitchen
      edgert build digits.onnx --calibration cal.npz --holdout hold.npz --target raspberry-pi-4
      edgert build yolo.onnx --calibration cal.npz --holdout hold.npz --target raspberry-pi-5 --postprocess yolo \\
          --metric map --precision auto

    \b
    The metrics of the accuracy gate (--metric):
      auto    the first of map, cer, top1 and decisions that fits the hold-out and the model.
      top1    top-1 accuracy with labels; without labels, how often artifact and FP32 name the same class.
      top5    how often the right class is among the first five; needs labels.
      map     a detector's mean average precision; needs --postprocess and `boxes` in the hold-out.
      wer     1 - the word error rate; needs --postprocess with [ctc], and texts in the hold-out.
      cer     1 - the character error rate; needs the same as wer.
      window_f1, event_f1   F1 of the answered classes, by window or by event; needs labels and [classify].
      decisions  how far the answers that an app reads (classes, boxes, ...) agree with FP32's, in the worst output.
      cosine  the mean cosine between the artifact's outputs and FP32's, in the worst output.
      module:function   your own function of (outputs, inputs, labels); a higher value is better.

    `edgert profiles` lists the targets.
    """
    from edgert_deploy.cli.build.progress import BuildProgress  # imported here, because --help needs no terminal's bars

    if init:
        _write_model_file(model, options, force, as_json)
        return
    conversion = options.conversion()
    options.check()
    profiles, signing_key = options.profiles(), options.signing_key()
    with work_folder():
        request = request_of(load_source(model, conversion), profiles, options)
    counts = {p.name: len(p.engines) if request.engines == "all" else 1 for p in profiles}
    judged: list[Choice] = []
    with BuildProgress(counts) as progress:

        def report(choice: Choice) -> None:
            progress.done(choice.profile.name)
            judged.append(choice)
            if not as_json:
                table = build_output.rows(choice, request.source.model_bytes)
                # A build that fails before its first result prints no heading.
                progress.print(table if len(judged) > 1 else f"{build_output.HEADING}\n{table}")

        out = options.out or NewBundlePath().convert(f"{request.model}.edgert", None, click.get_current_context())
        try:
            result = build_bundle(request, signing_key, out, progress, report)
        except AccuracyTooLow as error:
            if not as_json:
                raise
            emit({"error": error.as_json(), "targets": build_output.targets(judged, request)}, "", as_json)
            click.get_current_context().exit(error.exit_code)
    emit(build_output.as_json(result, request), build_output.summary(result, request), as_json)


def _write_model_file(model: Path, options: BuildOptions, force: bool, as_json: bool) -> None:
    """Write the model file. Without --target, its targets are the profiles of the inventory's devices."""
    if unused := given_option(*BuildOptions.__dataclass_fields__.keys() - _INIT_OPTIONS):
        raise click.UsageError(
            f"--init does not use {unused}: omit it here, and give it in the model file or to the build"
        )
    kept = {"inputs": options.inputs, "buckets": options.buckets, "pads": options.pads}
    targets = options.targets or sorted({device.profile for device in options.inventory.devices()})
    with work_folder():
        path = write_model_file(load_source(model, options.conversion()), force, kept, targets)
    # A team shares the model file. The path of --convert-with exists only on this machine, so the file omits it.
    again = ("--convert-with", str(options.convert_with)) if options.convert_with else ()
    command = shlex.join(["edgert", "build", str(path), *again])
    emit({"model_file": str(path)}, f"{path}: edit it, then run {command}", as_json)
