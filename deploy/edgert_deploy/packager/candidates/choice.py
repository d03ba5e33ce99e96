"""The choice: which candidates a target gets, at most one for each of its engines, the best first.

A requested precision is kept: "int8" gives INT8, if needed with some layers in float, or an error that offers the other
precisions. If this machine has the target's processor, "auto" times the candidates that pass and takes the fastest.
Otherwise it takes the first that passes, INT8 first. It warns if the result is not INT8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from edgert.errors import AccuracyTooLow, ConfigInvalid, EdgeRTError, EngineMissing
from edgert_deploy.common.quantities import share_text
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import (
    BuildSpec,
    accepts,
    builder_for,
    check_source,
    first_engine,
    supports_operators,
)
from edgert_deploy.packager.candidates.candidate import WORTH_SHARE_MIN, Candidate, CandidateBuilder
from edgert_deploy.packager.candidates.evaluation import Evaluation
from edgert_deploy.packager.candidates.measure import Measurer, Timings, fastest
from edgert_deploy.packager.candidates.mixed_precision import Budget, Search, search_float_layers
from edgert_deploy.packager.candidates.recipes import CANNOT_BE_BUILT, NotBuilt, best_recipe, recipes_for, with_recipe
from edgert_deploy.packager.request import TargetRequest
from edgert_deploy.packager.sources.source_model import SourceModel


@dataclass(frozen=True)
class LeftOut:
    """An engine of the profile that gets no artifact, and why."""

    engine: str
    code: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """The artifacts of one profile: `packed` best first, all `tried`, and the FP32 `reference`.

    If no candidate of the first engine passes, `packed` is the candidate that lost least, and the accuracy gate fails.
    `not_built` are the recipes and precisions that an engine's tools refused.
    """

    profile: DeviceProfile
    packed: tuple[Candidate, ...]
    tried: tuple[Candidate, ...]
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()
    searches: tuple[tuple[str, Search], ...] = ()  # by engine
    timings: Timings = field(default_factory=dict)
    reference: Candidate | None = None
    not_built: tuple[NotBuilt, ...] = ()

    def tried_text(self, engine: str) -> str:
        """Return the attempts in `engine` with their scores; "" if there is only one."""
        words = [
            f"{candidate.how} {candidate.result.accuracy.artifact:.4f}{'' if candidate.passed else ' (fails)'}"
            for candidate in self.tried
            if candidate.artifact.engine == engine
        ]
        words += [f"{form.how} (not built)" for form in self.not_built if form.engine == engine]
        return ", ".join(words) if len(words) > 1 else ""


def all_packed(choices: Iterable[Choice]) -> dict[str, Candidate]:
    """Return the candidates that go into the bundle, sorted by id."""
    packed = {candidate.id: candidate for choice in choices for candidate in choice.packed}
    packed |= {choice.reference.id: choice.reference for choice in choices if choice.reference is not None}
    return dict(sorted(packed.items()))


def choose(builder: CandidateBuilder, target: TargetRequest, budget: Budget, measure: Measurer | None = None) -> Choice:
    """Build and judge the candidates of a target. With `measure` the fastest that passes comes first.

    Raises OperatorUnsupported, BuildFailed, EngineMissing or ConfigInvalid if the first engine gets no candidate.
    """
    findings = _Findings(target.profile, builder.progress)
    measure = _measurer(builder, target, measure, findings.warn)
    passed: list[list[Candidate]] = []  # by engine
    first = first_engine(builder.evaluation.source, target.engines)
    for engine in target.engines:
        is_first = engine == first
        try:
            check_source(builder.evaluation.source, engine, target.profile.name)
            candidates = _candidates(builder, target, engine, budget, findings, until_passed=measure is None)
            if good := [candidate for candidate in candidates if candidate.passed]:
                passed.append(worth_first(good))
                continue
            nearest = min(candidates, key=lambda candidate: candidate.result.accuracy.drop)
            failed = findings.choice((nearest,))
            if is_first:  # the accuracy gate fails: more engines would not help
                return failed
            raise AccuracyTooLow(_loss_text(failed, nearest))
        except (*CANNOT_BE_BUILT, AccuracyTooLow, ConfigInvalid, EngineMissing) as error:
            if is_first:
                raise
            # One warning of the whole build names the engines that do not support classical models.
            findings.leave_out(engine, error, warned=not supports_operators(builder.evaluation.source, engine))
    timings: Timings = {}
    if measure is not None:
        timings = measure(
            target.profile, builder.evaluation, [each for good in passed for each in good], builder.progress
        )
    packed = _sorted([fastest(good, timings) if timings else good[0] for good in passed], timings)
    _warn_of_float(target, packed, findings, timings, quantized=builder.evaluation.source.quantized)
    reference = None
    if target.with_reference and packed[0].artifact.precision != "fp32":
        reference = builder.build(BuildSpec(packed[0].artifact.engine, "fp32", target.profile))
    return findings.choice(packed, timings, reference)


@dataclass
class _Findings:
    """The findings of `choose` about a target."""

    profile: DeviceProfile
    progress: Callable[[str], None]
    tried: list[Candidate] = field(default_factory=list)
    not_built: list[NotBuilt] = field(default_factory=list)
    searches: list[tuple[str, Search]] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def warn(self, text: str) -> None:
        self.progress(f"warning: {text}")
        self.warnings.append(text)

    def leave_out(self, engine: str, error: EdgeRTError, *, warned: bool) -> None:
        self.left_out.append(LeftOut(engine, error.code, error.message))
        if not warned:
            self.warn(f"{self.profile.name} goes without {engine}: {error.message}")

    def choice(
        self, packed: tuple[Candidate, ...], timings: Timings | None = None, reference: Candidate | None = None
    ) -> Choice:
        return Choice(
            self.profile,
            packed,
            tuple(self.tried),
            tuple(self.left_out),
            tuple(self.warnings),
            tuple(self.searches),
            timings or {},
            reference,
            tuple(self.not_built),
        )


def _warn_of_float(
    target: TargetRequest, packed: Sequence[Candidate], findings: _Findings, timings: Timings, *, quantized: bool
) -> None:
    """Warn of each artifact that computes in float although the user may expect INT8."""
    for candidate in packed:
        if target.is_auto and not candidate.is_int8:
            findings.warn(f"{target.profile.name}: {_why_not_int8(candidate, findings.tried, timings)}")
        elif not (target.is_auto or quantized or candidate.is_worth_it or candidate.artifact.float_layers):
            # The engine itself leaves most of the work in float. After a search for layers, its outcome already reports
            # that.
            share = share_text(candidate.artifact.int8_share)
            findings.warn(
                f"{target.profile.name}: {candidate.artifact.engine} computes {share} of the work in INT8 and the rest in float; "
                "--precision auto would take another precision"
            )


def certain_specs(evaluation: Evaluation, targets: Iterable[TargetRequest]) -> list[BuildSpec]:
    """Return the specs to build whatever the accuracy gate decides, each once."""
    specs: dict[str, BuildSpec] = {}
    for target in targets:
        wanted = [_first_spec(evaluation.source, engine, target) for engine in target.engines]
        if target.with_reference:
            wanted.append(BuildSpec(target.engines[0], "fp32", target.profile))
        for spec in wanted:
            if accepts(evaluation.source, spec.engine):  # `choose` refuses the others
                specs.setdefault(spec.id, spec)
    return list(specs.values())


def check_gate(choices: Sequence[Choice]) -> None:
    """Raise AccuracyTooLow if an artifact of any target did not pass."""
    failed = [(choice, candidate) for choice in choices for candidate in choice.packed if not candidate.passed]
    if not failed:
        return
    parts = [
        f"target {choice.profile.name}: {candidate.artifact.engine} {_loss_text(choice, candidate)}"
        for choice, candidate in failed
    ]
    parts += [warning for choice, _ in failed for warning in choice.warnings]
    first = failed[0][1]
    limits = first.result.limits
    allowed = f"{limits.max_drop:.4f}"
    if limits.max_class_drop is not None:
        allowed += f", {limits.max_class_drop:.4f} of any class or slice"
    offer = "allow FP16 or FP32 with --precision auto, " if first.is_int8 else ""
    advice = f"Use calibration samples that resemble the data in the field, {offer}or raise --max-drop"
    in_fp32 = [
        one for choice, _ in failed for one in choice.tried if one.artifact.precision == "fp32" and not one.passed
    ]
    if in_fp32:
        engine = in_fp32[0].artifact.engine
        advice = f"{engine} fails in FP32 too, so it computes this model wrongly: leave it out of the profile's engines"
    raise AccuracyTooLow(f"{'; '.join(parts)}; allowed is {allowed} and no bundle was written. {advice}")


def _loss_text(choice: Choice, nearest: Candidate) -> str:
    """Return the loss of an engine's best candidate, and all attempts in that engine."""
    tried = choice.tried_text(nearest.artifact.engine)
    return nearest.result.loss() + (f" (tried: {tried})" if tried else "")


def _measurer(
    builder: CandidateBuilder, target: TargetRequest, measure: Measurer | None, warn: Callable[[str], None]
) -> Measurer | None:
    """Return the measurer of a target: the user's or, for "auto", this machine; None if none fits."""
    name = target.profile.name
    if measure is None and target.is_auto:
        on_host = Measurer()
        if on_host.covers(target.profile):
            return on_host
        builder.progress(
            f"{name}: not timed, since this machine has another processor. INT8 counts as the fastest if it passes; "
            "--measure-on DEVICE times it on a device"
        )
    elif measure is not None and not measure.covers(target.profile):
        warn(f"{name} is not measured: name a device of this profile with --measure-on")
        return None
    return measure


def _candidates(
    builder: CandidateBuilder,
    target: TargetRequest,
    engine: str,
    budget: Budget,
    findings: _Findings,
    *,
    until_passed: bool,
) -> list[Candidate]:
    """Build one engine's candidates, simplest first.

    With `until_passed`, stop at the first that passes. `findings.not_built` gets each candidate that cannot be built.
    Raises the last error if nothing can be built.
    """
    name = target.profile.name
    tried: list[Candidate] = []
    failures: list[EdgeRTError] = []
    for precision in target.precisions:
        try:
            spec = BuildSpec(engine, precision, target.profile)
            if precision == "int8":
                for candidate in _int8_candidates(builder, target, spec, budget, findings, until_passed=until_passed):
                    tried.append(candidate)  # built candidates stay, even if a later build fails
            else:
                tried.append(builder.build(spec))
        except CANNOT_BE_BUILT as error:
            builder.tell_failure(f"{name}: no {engine} {precision}", error)
            failures.append(error)
            if precision != "int8":
                findings.not_built.append(NotBuilt(engine, precision.upper(), error.message))
            continue
        if until_passed and any(candidate.passed and candidate.is_worth_it for candidate in tried):
            break
    if not tried:
        raise failures[-1]  # the last error is the most useful one: that of FP32, if it was tried
    findings.tried += tried
    return tried


def _int8_candidates(
    builder: CandidateBuilder,
    target: TargetRequest,
    spec: BuildSpec,
    budget: Budget,
    findings: _Findings,
    *,
    until_passed: bool,
) -> Iterator[Candidate]:
    """Build INT8 by its recipes; if none passes, also with the most harmful layers in float."""
    best, others = best_recipe(builder, spec, target.recipe, findings.not_built)
    yield from (best, *others)
    if not best.passed and not budget.spent:
        search = search_float_layers(builder, best, budget, WORTH_SHARE_MIN if target.is_auto else 0.0)
        if search is not None:
            findings.searches.append((spec.engine, search))
            findings.warn(f"{target.profile.name}: {search.outcome()}")
            if search.found is not None:
                best = search.found
                yield best
    if not until_passed:
        for precision in builder_for(spec.engine).timed_beside_int8:
            yield builder.build(replace(best.spec, precision=precision))


def worth_first(passed: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates, simplest first; those with hardly any INT8 come last."""
    return sorted(passed, key=lambda candidate: not candidate.is_worth_it)


def _first_spec(source: SourceModel, engine: str, target: TargetRequest) -> BuildSpec:
    spec = BuildSpec(engine, target.precisions[0], target.profile)
    return (
        with_recipe(spec, recipes_for(source, engine, target.profile, target.recipe)[0])
        if spec.precision == "int8"
        else spec
    )


def _sorted(candidates: Sequence[Candidate], timings: Timings) -> tuple[Candidate, ...]:
    """Sort by speed, the fastest first, if there are times; else keep the profile's order."""
    waiting, ordered = list(candidates), list[Candidate]()
    while waiting and timings:
        ordered.append(fastest(waiting, timings))
        waiting = [candidate for candidate in waiting if candidate is not ordered[-1]]
    return tuple(ordered or waiting)


def _why_not_int8(candidate: Candidate, tried: Sequence[Candidate], timings: Timings) -> str:
    engine, own = candidate.artifact.engine, timings.get(candidate.id)
    reasons = []
    for other in tried:
        if other.artifact.engine != engine or not other.is_int8:
            continue
        kind, timing = f"{other.artifact.kind.upper()} ({other.how})", timings.get(other.id)
        if not other.passed:
            reasons.append(f"{kind}: {other.result.loss()}")
        elif not other.is_worth_it:
            reasons.append(f"{kind} has only {share_text(other.artifact.int8_share)} of the work in INT8")
        elif own is not None and timing is not None and not timing.error:
            reasons.append(f"{kind} took {timing.p50_ms:.4f} ms, {candidate.artifact.kind.upper()} {own.p50_ms:.4f} ms")
    reason = "; ".join(reasons) or "INT8 could not be built"
    return f"{engine} gets {candidate.artifact.kind.upper()}, not INT8: {reason}"
