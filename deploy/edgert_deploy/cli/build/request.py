"""Turn the options of `edgert build` into a `BuildRequest`: read the samples and the rules."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from functools import partial

from edgert.bundle.expiry import time_text
from edgert.bundle.rules import Classify, Ctc, Detect, Preprocess
from edgert.bundle.signal_rules import Series, Sound, check_smoothing
from edgert.bundle.text_rules import Embed, Text
from edgert.errors import ConfigInvalid
from edgert.processing.preprocessors import InputRule
from edgert.toml_file import about
from edgert_deploy.cli.build.options import BuildOptions
from edgert_deploy.common.file_cache import default_cache
from edgert_deploy.common.quantities import expiry_from
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.accuracy.golden_samples import SAMPLES as HOLDOUT_SAMPLES_MIN
from edgert_deploy.packager.builders.folded_preprocessing import folded
from edgert_deploy.packager.candidates.measure import Measurer, measurer_on
from edgert_deploy.packager.new_model_file import name_from
from edgert_deploy.packager.request import BuildRequest
from edgert_deploy.packager.samples.processing import OutputRule, read_classify, read_postprocess, read_preprocess
from edgert_deploy.packager.samples.samples import CALIBRATION_SAMPLES_MIN, load_samples
from edgert_deploy.packager.samples.stateful_samples import read_state
from edgert_deploy.packager.settings import BuildSettings
from edgert_deploy.packager.sources.source_model import SourceModel

TEXT_LETTERS_MAX = 10_000
DOWNGRADE_EXPIRES = "30d"  # the default, because an attacker could replay a downgrade that never expires


def request_of(source: SourceModel, profiles: tuple[DeviceProfile, ...], options: BuildOptions) -> BuildRequest:
    source, before, state_id = _input_rule(source, options)
    after = _output_rule(source, before, options)
    for option, text in (("--licence", options.licence), ("--notes", options.notes)):
        if len(text) > TEXT_LETTERS_MAX:
            raise ConfigInvalid(f"{option} has {len(text)} letters; at most {TEXT_LETTERS_MAX}: shorten it")
    assert options.calibration is not None  # BuildOptions.check refuses a build without samples
    assert options.holdout is not None
    reading = partial(
        load_samples,
        source=source,
        preprocess=before,
        class_names=after.labels if isinstance(after, Classify | Detect) else (),
        transcripts=isinstance(after, Ctc),
    )
    now_s, expires = time.time(), options.expires or (DOWNGRADE_EXPIRES if options.downgrade_from else "")
    settings = {each.name: getattr(options, each.name) for each in fields(BuildSettings)}
    return BuildRequest(
        **settings,
        source=source,
        calibration=reading(options.calibration, at_least=CALIBRATION_SAMPLES_MIN),
        holdout=reading(options.holdout, at_least=HOLDOUT_SAMPLES_MIN),
        targets=profiles,
        measure=_measurer(options, profiles),
        model=options.name or name_from(source.path),
        downgrade_from=options.downgrade_from or 0,
        expires=expiry_from(expires, now_s) if expires else "",
        signed_at=time_text(now_s) if expires else "",
        preprocess=before,
        state_id=state_id,
        classify=after if isinstance(after, Classify) else None,
        detect=after if isinstance(after, Detect) else None,
        ctc=after if isinstance(after, Ctc) else None,
        embed=after if isinstance(after, Embed) else None,
        cache=None if options.no_cache else default_cache(),
    )


def _input_rule(source: SourceModel, options: BuildOptions) -> tuple[SourceModel, InputRule | None, str]:
    """Return the model (with state and folded preprocessing), the rule for its input, and `state_id`."""
    before, state_id = None, ""
    if options.preprocess is not None:
        state, state_id = read_state(options.preprocess, source)
        source = replace(source, state=state)
        before = read_preprocess(options.preprocess, source)
    if source.buckets is not None and (source.state or not isinstance(before, Text | None)):
        raise ConfigInvalid(
            "--buckets cannot be combined with [[state]], or with a --preprocess other than [text]: give the axis a length "
            "with --input"
        )
    if options.fold_preprocess:
        if not isinstance(before, Preprocess):
            raise ConfigInvalid("--fold-preprocess needs a rule for images: give --preprocess imagenet, yolo or a file")
        source, before = folded(source, before)
    return source, before, state_id


def _output_rule(source: SourceModel, before: InputRule | None, options: BuildOptions) -> OutputRule | None:
    after: OutputRule | None = None
    if options.postprocess is not None:
        after = read_postprocess(options.postprocess, source, options.labels, before)
        if source.buckets is not None and isinstance(after, Detect):
            raise ConfigInvalid(
                "--buckets cannot be combined with a detector's boxes, which need fixed sizes: omit one of them"
            )
    elif options.labels is not None:
        after = read_classify(options.labels, source)
    if isinstance(after, Classify) and after.smooth is not None:
        with about(options.postprocess):
            check_smoothing(after, before if isinstance(before, Sound | Series) else None)
    return after


def _measurer(options: BuildOptions, profiles: tuple[DeviceProfile, ...]) -> Measurer | None:
    if options.measure_on is None:
        return Measurer() if options.measure else None
    return measurer_on(options.inventory.device(options.measure_on), profiles)
