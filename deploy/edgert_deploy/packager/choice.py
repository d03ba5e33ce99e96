"""The choice: which candidates a target gets, one for each engine of its ladder, the best first.

A precision that is asked for is kept: "int8" is INT8, where need be with some layers in float, or an error that
offers the others. "auto" takes what passes, INT8 first, and says so loudly where it is anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from edgert.errors import AccuracyTooLow, BuildFailed, ConfigInvalid, EdgeRTError, EngineMissing, OperatorUnsupported
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import Precision
from edgert_deploy.packager.candidates import Candidate, Order, Workshop
from edgert_deploy.packager.measure import Measurer, Timings, fastest
from edgert_deploy.packager.mixed_precision import Budget, Fallback, fall_back
from edgert_deploy.packager.sources.source_model import check_engine

Asked = Literal["auto", "int8", "fp16", "fp32"]
PRECISIONS_OF: dict[str, tuple[Precision, ...]] = {
    "auto": ("int8", "fp16", "fp32"),
    "int8": ("int8",),
    "fp16": ("fp16",),
    "fp32": ("fp32",),
}


@dataclass(frozen=True)
class LeftOut:
    """An engine of a ladder that gets no artifact, and why."""

    engine: str
    code: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """What `profile` gets: `ladder`, best first; `tried`, every candidate that was looked at for it; their times.

    Where the first engine has none that passes, `ladder` holds the one that came nearest, and the gate fails.
    """

    profile: DeviceProfile
    ladder: tuple[Candidate, ...]
    tried: tuple[Candidate, ...]
    left_out: tuple[LeftOut, ...] = ()
    remarks: tuple[str, ...] = ()
    fallbacks: tuple[tuple[str, Fallback], ...] = ()
    timings: Timings = field(default_factory=dict)


def choose(
    shop: Workshop,
    profile: DeviceProfile,
    asked: Asked,
    engines: Sequence[str],
    budget: Budget,
    measure: Measurer | None = None,
) -> Choice:
    """Build and judge for `engines`, the first of which must do: raises OperatorUnsupported, BuildFailed and their kin.

    What looking for layers to put into float may cost, all in all, says `budget`. With `measure`, each precision that
    `asked` allows is built, and the fastest that passes is taken: of each engine, and first of the ladder.
    """
    choice = Choice(profile, (), ())
    if measure is not None and not measure.covers(profile):
        choice = _remarked(
            shop, choice, f"{profile.name} is not measured: that takes a device of its kind (--measure-on)"
        )
        measure = None
    passed: list[tuple[Candidate, ...]] = []  # of each engine
    for rung, engine in enumerate(engines):
        try:
            check_engine(shop.brief.source, engine, profile.name)
            tried, fallback = _tried(shop, profile, asked, engine, budget, until_passed=measure is None)
        except (ConfigInvalid, OperatorUnsupported, BuildFailed, EngineMissing) as error:
            if rung == 0:
                raise
            choice = _without(shop, choice, engine, error)
            continue
        choice = replace(choice, tried=(*choice.tried, *tried))
        if fallback is not None:
            choice = replace(choice, fallbacks=(*choice.fallbacks, (engine, fallback)))
            choice = _remarked(shop, choice, f"{profile.name}: {_said(engine, tried[0], fallback)}")
        good = tuple(candidate for candidate in tried if candidate.verdict.passed)
        nearest = min(tried, key=lambda candidate: candidate.verdict.accuracy.drop)
        if good:
            passed.append(good)
        elif rung == 0:  # the gate fails: nothing else is worth its time
            return replace(choice, ladder=(nearest,))
        else:
            choice = _without(shop, choice, engine, AccuracyTooLow(nearest.verdict.complaint()))
    if measure is not None:
        everything = [candidate for good in passed for candidate in good]
        choice = replace(choice, timings=measure(profile, shop.brief, everything, shop.progress))
    ladder = _sorted([fastest(good, choice.timings) if choice.timings else good[0] for good in passed], choice.timings)
    choice = replace(choice, ladder=ladder)
    for candidate in ladder:
        if asked == "auto" and not candidate.artifact.precision.startswith("int8"):
            choice = _remarked(shop, choice, f"{profile.name}: {_not_int8(candidate, choice)}")
    return choice


def _sorted(ladder: Sequence[Candidate], timings: Timings) -> tuple[Candidate, ...]:
    """The fastest first, where there are times; else in the profile's order."""
    left, found = list(ladder), list[Candidate]()
    while left and timings:
        found.append(fastest(left, timings))
        left = [candidate for candidate in left if candidate is not found[-1]]
    return tuple(found or left)


def _tried(
    shop: Workshop, profile: DeviceProfile, asked: Asked, engine: str, budget: Budget, *, until_passed: bool
) -> tuple[tuple[Candidate, ...], Fallback | None]:
    """The candidates of one engine, simplest first, and what the search for layers in float brought.

    `until_passed`: none after the first that passes.

    Raises what the first said where none can be built.
    """
    tried: list[Candidate] = []
    failures: list[EdgeRTError] = []
    fallback = None
    for precision in PRECISIONS_OF[asked]:
        try:
            tried.append(shop.make(Order(engine, precision, profile)))
            if precision == "int8" and not tried[-1].verdict.passed and budget.seconds:
                shop.progress(f"{profile.name}: {engine} INT8 does not pass: {tried[-1].verdict.complaint()}")
                fallback = fall_back(shop, tried[-1], budget)
                if fallback is not None and fallback.found is not None:
                    tried.append(fallback.found)
            if precision == "int8" and engine == "tensorrt" and not until_passed:
                # The same layers in INT8, the others in FP16: on a GPU that is another speed, here only another size.
                tried.append(shop.make(Order(engine, "int8fp16", profile, tried[-1].order.float_layers)))
        except (BuildFailed, OperatorUnsupported) as error:
            shop.progress(f"{profile.name}: no {engine} {precision}: {error.message}")
            failures.append(error)
            continue
        if until_passed and tried[-1].verdict.passed:
            break
    if not tried:
        raise failures[0]
    return tuple(tried), fallback


def _said(engine: str, plain: Candidate, fallback: Fallback) -> str:
    """What came of the search, in one line."""
    if fallback.found is not None:
        names = fallback.found.artifact.float_layers
        more = "; the budget ended the search for fewer" if fallback.spent else ""
        return (
            f"{engine} INT8 passes with {len(names)} of {len(fallback.harms)} layers in float, the most harmful first: "
            f"{', '.join(names)} (without: {plain.verdict.complaint()}){more}"
        )
    tries = len(fallback.trials)
    if fallback.spent:
        return (
            f"the budget was spent after {len(fallback.harms)} layers and {tries} tries, none of which passed in {engine}; "
            "the same build goes on from there, --budget gives it longer"
        )
    most = max((trial.count for trial in fallback.trials), default=0)
    return f"{engine} INT8 does not pass with up to {most} of {len(fallback.harms)} layers in float either"


def _not_int8(candidate: Candidate, choice: Choice) -> str:
    """Why an engine gets something else than INT8."""
    kind, engine = candidate.artifact.kind.upper(), candidate.artifact.engine
    same = [c for c in choice.tried if c.artifact.engine == engine and c.artifact.precision.startswith("int8")]
    failed = [f"{c.artifact.kind.upper()}: {c.verdict.complaint()}" for c in same if not c.verdict.passed]
    own = choice.timings.get(candidate.id)
    slower = [
        f"{c.artifact.kind.upper()} took {choice.timings[c.id].p50_ms:.4f} ms, it {own.p50_ms:.4f} ms"
        for c in same
        if c.verdict.passed and own is not None and c.id in choice.timings and not choice.timings[c.id].error
    ]
    return f"{engine} gets {kind}, not INT8: {'; '.join(failed + slower) or 'INT8 could not be built'}"


def _without(shop: Workshop, choice: Choice, engine: str, error: EdgeRTError) -> Choice:
    left_out = LeftOut(engine, error.code, error.message)
    choice = _remarked(shop, choice, f"{choice.profile.name} goes without {engine}: {error.message}")
    return replace(choice, left_out=(*choice.left_out, left_out))


def _remarked(shop: Workshop, choice: Choice, remark: str) -> Choice:
    shop.progress(f"warning: {remark}")
    return replace(choice, remarks=(*choice.remarks, remark))
