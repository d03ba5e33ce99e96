"""The work of `edgert build`: it builds a bundle or writes a model file, and prints the result."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from edgert.cli.output import emit
from edgert.errors import AccuracyTooLow
from edgert_deploy.cli.build import output
from edgert_deploy.cli.build.options import BuildOptions
from edgert_deploy.cli.build.progress import BuildProgress
from edgert_deploy.cli.build.request import request_of
from edgert_deploy.cli.shared.option_groups import given_option
from edgert_deploy.cli.shared.types import NewBundlePath
from edgert_deploy.packager.candidates.choice import Choice
from edgert_deploy.packager.new_model_file import write_model_file
from edgert_deploy.packager.pack import build_bundle
from edgert_deploy.packager.processes.work_folder import work_folder
from edgert_deploy.packager.sources.source_model import load_source

# --init uses these options. Keys of the model file replace all others.
_INIT_OPTIONS = {"inputs", "buckets", "pads", "targets", "convert_with", "profiles_dir", "inventory", "no_cache"}


def build_model(model: Path, options: BuildOptions, as_json: bool) -> None:
    """Build, check and sign the bundle, and print a row for each artifact."""
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
                table = output.rows(choice, request.source.model_bytes)
                # A build that fails before its first result prints no heading.
                progress.print(table if len(judged) > 1 else f"{output.HEADING}\n{table}")

        out = options.out or NewBundlePath().convert(f"{request.model}.edgert", None, click.get_current_context())
        try:
            result = build_bundle(request, signing_key, out, progress, report)
        except AccuracyTooLow as error:
            if not as_json:
                raise
            emit({"error": error.as_json(), "targets": output.targets(judged, request)}, "", as_json)
            click.get_current_context().exit(error.exit_code)
    emit(output.as_json(result, request), output.summary(result, request), as_json)


def write_new_model_file(model: Path, options: BuildOptions, force: bool, as_json: bool) -> None:
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
