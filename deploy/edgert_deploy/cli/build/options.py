"""The options of `edgert build`, in the sections of its help."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgert.bundle.signing import SigningKey
from edgert.cli.output import progress
from edgert_deploy.cli.shared.option_groups import gathered, section
from edgert_deploy.cli.shared.options import inventory_option, profiles_option
from edgert_deploy.cli.shared.types import FILE_NAME, FilePath, NewBundlePath, Number, ProfileName
from edgert_deploy.common.file_cache import default_cache
from edgert_deploy.common.keys import signing_key
from edgert_deploy.devices.inventory import Inventory
from edgert_deploy.devices.profiles import DeviceProfile, load_profile
from edgert_deploy.packager.settings import BUDGET_DEFAULT, DROP_MAX, METRICS, BuildSettings

if TYPE_CHECKING:
    from edgert_deploy.packager.sources.formats.convert import Conversion

FILE = FilePath(path_type=Path)


@dataclass(frozen=True)
class BuildOptions(BuildSettings):
    """The options of a build, from the command line and the model file."""

    calibration: Path | None
    holdout: Path | None
    inputs: tuple[str, ...]
    buckets: str | None
    pads: tuple[str, ...]
    convert_with: str | None
    preprocess: Path | None
    fold_preprocess: bool
    postprocess: Path | None
    labels: Path | None
    targets: tuple[str, ...]
    profiles_dir: Path | None
    measure: bool
    measure_on: str | None
    inventory: Inventory
    out: Path | None
    name: str | None
    downgrade_from: int | None
    expires: str
    key: str | None
    no_cache: bool

    def conversion(self) -> Conversion:
        """Return the settings that turn the model into ONNX with fixed lengths. Raises ConfigInvalid."""
        # imported here, because the options need no NumPy
        from edgert_deploy.packager.sources.formats.convert import Conversion, read_inputs
        from edgert_deploy.packager.sources.onnx_graph.bucket_axis import read_buckets

        python = self.convert_with or sys.executable
        buckets = read_buckets(self.buckets, self.pads)
        cache = None if self.no_cache else default_cache()
        return Conversion(python, read_inputs(self.inputs), buckets, cache, progress)

    def check(self) -> None:
        """Refuse a build without samples or targets. The model file may name them, so click cannot refuse it."""
        samples = {"--calibration": self.calibration, "--holdout": self.holdout, "--target": self.targets or None}
        if missing := [name for name, value in samples.items() if value is None]:
            targets = " (edgert profiles lists the targets)" if "--target" in missing else ""
            raise click.UsageError(
                f"missing {', '.join(missing)}{targets}: give them, or write a model file with edgert build --init MODEL"
            )
        if 0 < (self.downgrade_from or 0) <= self.release:
            raise click.UsageError(
                f"release {self.release} is not a downgrade from {self.downgrade_from}: "
                "give the highest release that this bundle may replace"
            )
        if self.measure and self.measure_on:
            raise click.UsageError("give either --measure or --measure-on")

    def profiles(self) -> tuple[DeviceProfile, ...]:
        """Return the profiles of the targets. Raises ConfigInvalid."""
        return tuple(load_profile(target, self.profiles_dir) for target in self.targets)

    def signing_key(self) -> SigningKey:
        """Return the key that signs the bundle. Raises ConfigInvalid."""
        return signing_key(self.key)


# The command receives these options as `options`.
build_options = gathered(
    "options",
    BuildOptions,
    *section(
        "Samples and the accuracy gate",
        click.option(
            "--calibration",
            type=FILE,
            help="Samples to quantize with: .npz, .npy, a folder of .npy, images, sound, series or texts, or module:function.",
        ),
        click.option(
            "--holdout", type=FILE, help="Samples that evaluate the artifacts; none of them may be a training sample."
        ),
        click.option(
            "--allow-overlap",
            is_flag=True,
            help="Accept hold-out samples that are also calibration samples; the gate is then less reliable.",
        ),
        click.option(
            "--metric",
            default="auto",
            show_default=True,
            metavar="NAME|MODULE:FUNCTION",
            help=f"The metric of the accuracy gate: {', '.join(METRICS)} or module:function.",
        ),
        click.option(
            "--max-drop",
            type=Number(0),
            metavar="NUMBER",
            default=DROP_MAX,
            show_default=True,
            help="The largest loss with which an artifact passes: FP32's score minus the artifact's score.",
        ),
        click.option(
            "--max-class-drop",
            type=Number(0),
            metavar="NUMBER",
            help="The largest loss of each class and slice with which an artifact passes.",
        ),
    ),
    *section(
        "The model's inputs and outputs",
        click.option(
            "--input",
            "inputs",
            multiple=True,
            metavar="NAME=SHAPE",
            help="The shape of an input, if the model leaves axes open or you want other lengths: images=1,3,640,640, ids=int64:1,128.",
        ),
        click.option(
            "--buckets",
            metavar="AXIS=SIZES",
            help="Keep one axis open, and build for some of its lengths: tokens=32,64,128. Devices pad to the next length.",
        ),
        click.option(
            "--pad",
            "pads",
            multiple=True,
            metavar="INPUT=NUMBER",
            help="With --buckets: the number that pads an input [default: 0].",
        ),
        click.option(
            "--convert-with",
            metavar="PYTHON",
            help="The Python that has Keras or PyTorch [default: the Python that runs edgert].",
        ),
        click.option(
            "--preprocess",
            type=FILE,
            help="The rule that turns images, signals or text into the model's input: imagenet, yolo or a .toml.",
        ),
        click.option(
            "--fold-preprocess",
            is_flag=True,
            help="Make preprocessing part of the model, which then accepts UINT8 frames.",
        ),
        click.option(
            "--postprocess", type=FILE, help="The rule that turns the model's outputs into answers: yolo or a .toml."
        ),
        click.option("--labels", type=FILE, help="File with the names of the classes, one on each line."),
    ),
    *section(
        "Targets and artifacts",
        click.option(
            "--target", "targets", multiple=True, type=ProfileName(), help="A device profile. May be repeated."
        ),
        profiles_option,
        click.option(
            "--engines",
            type=click.Choice(["all", "first"]),
            default="all",
            show_default=True,
            help="Build for all engines of a profile, or only for the first.",
        ),
        click.option(
            "--precision",
            type=click.Choice(["auto", "int8", "fp16", "fp32"]),
            help="The precision for all targets [default: each profile's own]; auto chooses the fastest of int8, fp16, fp32 that passes.",
        ),
        click.option(
            "--recipe",
            default="",
            metavar="NAME",
            help="Quantize only with this recipe, in engines that have it: min-max, percentile, ... [default: try all recipes in turn].",
        ),
        click.option(
            "--budget",
            type=click.IntRange(0, 1000),
            default=BUDGET_DEFAULT,
            show_default=True,
            metavar="BUILDS",
            help="If INT8 does not pass, build at most this many artifacts to find the smallest set of layers to leave in "
            "float. 0 turns this search off.",
        ),
        click.option(
            "--with-reference", is_flag=True, help="Add FP32 artifacts that devices compare live answers with."
        ),
        click.option(
            "--measure", is_flag=True, help="Time the candidates on this machine, and pack the fastest that passes."
        ),
        click.option("--measure-on", metavar="SELECTOR", help="Time the candidates on a device of the inventory."),
        inventory_option,
    ),
    *section(
        "The bundle",
        click.option("--out", type=NewBundlePath(), help="The bundle to write [default: NAME.edgert]."),
        click.option("--name", metavar="NAME", help="The model's name on devices [default: the name of its file]."),
        click.option(
            "--release",
            type=click.IntRange(1, 2**53 - 1),
            metavar="NUMBER",
            default=1,
            show_default=True,
            help="The release number; each new release of a model needs a higher one.",
        ),
        click.option(
            "--downgrade-from",
            type=click.IntRange(2, 2**53 - 1),
            metavar="RELEASE",
            help="Let devices replace releases up to RELEASE by this older release. The bundle expires after 30 days, or at --expires.",
        ),
        click.option(
            "--expires",
            default="",
            metavar="TIME",
            help="Devices do not install the bundle after this time: 90d, 12h, 2027-02-19 (UTC).",
        ),
        click.option(
            "--key",
            type=FILE_NAME,
            metavar="NAME|FILE",
            help="Key to sign with: a name (edgert keys list), or the file of a private key [default: default].",
        ),
        click.option("--licence", default="", help="The model's licence; edgert bundle inspect shows it."),
        click.option(
            "--notes", default="", help="Notes in the bundle, such as the origin of the data and the changes."
        ),
    ),
    *section(
        "The work",
        click.option("--no-cache", is_flag=True, help="Build all artifacts again, and keep none for the next build."),
        click.option(
            "--jobs",
            type=click.IntRange(0, 64),
            metavar="COUNT",
            default=0,
            help="Artifacts to build at a time [default: as many as cores and memory allow].",
        ),
    ),
)
