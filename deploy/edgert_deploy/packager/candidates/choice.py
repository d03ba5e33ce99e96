"""The choice: the candidates that a target gets, at most one for each of its engines, the best first.

The choice keeps a requested precision. "int8" gives INT8, if necessary with some layers in float, or an error that
offers the other precisions. "auto" times the candidates that pass and chooses the fastest, if this machine has the
target's processor. On another machine, "auto" chooses the first candidate that passes, INT8 first. It warns if the
result is not INT8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from edgert.errors import AccuracyTooLow, ConfigInvalid, EdgeRTError, EngineMissing
from edgert_deploy.common.quantities import share_text
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import (
    BuildSpec,
    Precision,
    accepts,
    accepts_quantization,
    builder_for,
    check_source,
    first_engine,
    supports_operators,
)
from edgert_deploy.packager.candidates.candidate import INT8_SHARE_MIN, Candidate, CandidateBuilder
from edgert_deploy.packager.candidates.evaluation import Evaluation
from edgert_deploy.packager.candidates.measure import Measurer, Timings, fastest
from edgert_deploy.packager.candidates.mixed_precision import Budget, Search, search_float_layers
from edgert_deploy.packager.candidates.recipes import CANNOT_BE_BUILT, NotBuilt, best_recipe, recipes_for, with_recipe
from edgert_deploy.packager.request import TargetRequest
from edgert_deploy.packager.sources.source_model import SourceModel

FP32_SQNR_DB_MIN = 40.0  # an error of 1 %. The FP32 artifacts of most models have an error below 0.01 %


@dataclass(frozen=True)
class LeftOut:
    """An engine of the profile without an artifact, and the reason."""

    engine: str
    code: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """The artifacts of one profile.

    Attributes:
        packed: The candidates for the bundle, the best first. If no candidate of the first engine passes, `packed` is
            the candidate with the smallest loss, and the accuracy gate fails.
        tried: The candidates that were built to choose from. A candidate is missing if another build of its engine
            raised an error outside CANNOT_BE_BUILT.
        searches: The searches for layers in float, with their engines.
        reference: The FP32 artifact for comparisons on the device.
        not_built: The recipes and precisions that could not be built.
    """

    profile: DeviceProfile
    packed: tuple[Candidate, ...]
    tried: tuple[Candidate, ...]
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()
    searches: tuple[tuple[str, Search], ...] = ()
    timings: Timings = field(default_factory=dict)
    reference: Candidate | None = None
    not_built: tuple[NotBuilt, ...] = ()

    def tried_text(self, engine: str) -> str:
        """Return the attempts in `engine` with their scores. Return "" if there was only one attempt."""
        words = [
            f"{candidate.how} {candidate.result.accuracy.artifact:.4f}{'' if candidate.passed else ' (fails)'}"
            for candidate in self.tried
            if candidate.artifact.engine == engine
        ]
        words += [f"{form.how} (not built)" for form in self.not_built if form.engine == engine]
        return ", ".join(words) if len(words) > 1 else ""


def all_packed(choices: Sequence[Choice]) -> dict[str, Candidate]:
    """Return the candidates that go into the bundle, sorted by id."""
    packed = {candidate.id: candidate for choice in choices for candidate in choice.packed}
    packed |= {choice.reference.id: choice.reference for choice in choices if choice.reference is not None}
    return dict(sorted(packed.items()))


def choose(builder: CandidateBuilder, target: TargetRequest, budget: Budget, measure: Measurer | None = None) -> Choice:
    """Build and judge the candidates of a target. Return the choice.

    Raises OperatorUnsupported, BuildFailed, EngineMissing or ConfigInvalid if the first engine gets no candidate.

    `budget` has the builds that searches for layers in float may still use. `measure` times the candidates that pass,
    so that the fastest one comes first. With None, this machine times them if the precision is "auto" and this machine
    has the target's processor.
    """
    findings = _Findings(builder, target)
    source = builder.evaluation.source
    measure = _measurer(findings, measure)
    passed: list[list[Candidate]] = []  # a list for each engine
    first = first_engine(source, target.engines)
    for engine in target.engines:
        is_first = engine == first
        try:
            check_source(source, engine, target.profile.name)
            candidates = _EngineBuild(findings, engine, budget, until_passed=measure is None).candidates()
            if good := [candidate for candidate in candidates if candidate.passed]:
                passed.append(by_preference(good))
                continue
            nearest = min(candidates, key=lambda candidate: candidate.result.accuracy.drop)
            failed = findings.choice((nearest,))
            if is_first:  # the accuracy gate fails, and artifacts of other engines would not change this
                return failed
            raise AccuracyTooLow(_loss_text(failed, nearest))
        except (*CANNOT_BE_BUILT, AccuracyTooLow, ConfigInvalid, EngineMissing) as error:
            if is_first:
                raise
            # If the engine lacks operators or FP64, one warning of the whole build already says so.
            findings.leave_out(engine, error, warned=not supports_operators(source, engine))
    timings = _timings(findings, passed, measure)
    packed = _sorted([fastest(good, timings) if timings else good[0] for good in passed], timings)
    _warn_of_float(findings, packed, timings)
    _warn_of_inexact_fp32(findings, packed)
    for candidate in packed:
        for remark in candidate.artifact.remarks:
            findings.warn(f"{findings.name}: {remark}")
    return findings.choice(packed, timings, _reference(findings, packed[0]))


@dataclass
class _Findings:
    """The findings of `choose` about a target."""

    builder: CandidateBuilder
    target: TargetRequest
    tried: list[Candidate] = field(default_factory=list)
    not_built: list[NotBuilt] = field(default_factory=list)
    searches: list[tuple[str, Search]] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.target.profile.name

    def warn(self, text: str) -> None:
        self.builder.progress(f"warning: {text}")
        self.warnings.append(text)

    def leave_out(self, engine: str, error: EdgeRTError, *, warned: bool) -> None:
        self.left_out.append(LeftOut(engine, error.code, error.message))
        if not warned:
            self.warn(f"{self.name} gets no {engine} artifact: {error.message}")

    def record_failure(self, engine: str, precision: Precision, error: EdgeRTError) -> None:
        self.builder.report_failure(f"{self.name}: no {engine} {precision}", error)
        self.not_built.append(NotBuilt(engine, precision.upper(), error.message))

    def choice(
        self, packed: tuple[Candidate, ...], timings: Timings | None = None, reference: Candidate | None = None
    ) -> Choice:
        return Choice(
            profile=self.target.profile,
            packed=packed,
            tried=tuple(self.tried),
            left_out=tuple(self.left_out),
            warnings=tuple(self.warnings),
            searches=tuple(self.searches),
            timings=timings or {},
            reference=reference,
            not_built=tuple(self.not_built),
        )


def _timings(findings: _Findings, passed: Sequence[Sequence[Candidate]], measure: Measurer | None) -> Timings:
    if measure is None:
        return {}
    builder = findings.builder
    candidates = [candidate for good in passed for candidate in good]
    return measure(findings.target.profile, builder.evaluation, candidates, builder.progress)


def _reference(findings: _Findings, best: Candidate) -> Candidate | None:
    """Build the FP32 artifact in the engine of `best`. Return None if it is unwanted or `best` is FP32."""
    target = findings.target
    if not target.with_reference or best.artifact.precision == "fp32":
        return None
    return findings.builder.build(BuildSpec(best.artifact.engine, "fp32", target.profile))


def _warn_of_float(findings: _Findings, packed: Sequence[Candidate], timings: Timings) -> None:
    """Add a warning for each artifact that computes in float although the user may expect INT8."""
    target, quantized = findings.target, findings.builder.evaluation.source.quantized
    for candidate in packed:
        if target.is_auto and not candidate.is_int8:
            findings.warn(f"{findings.name}: {_why_not_int8(candidate, findings.tried, timings)}")
        elif candidate.is_barely_int8 and not (quantized or candidate.artifact.float_layers):
            # The engine itself leaves most of the work in float. If layers stay in float after a search, the outcome of
            # the search already reports the share.
            share = share_text(candidate.artifact.int8_share)
            work = f"{share} of the work in INT8 and the rest in float"
            if candidate.is_int8_by_name_only:
                work = "all work in float, although the artifact is called INT8"
            advice = "" if target.is_auto else "; --precision auto would choose another precision"
            findings.warn(f"{findings.name}: {candidate.artifact.engine} computes {work}{advice}")


def _warn_of_inexact_fp32(findings: _Findings, packed: Sequence[Candidate]) -> None:
    """Add a warning for each FP32 artifact whose engine seems to compute another model."""
    if findings.builder.evaluation.source.quantized:  # each engine rounds the answers of such a model in its own way
        return
    for candidate in packed:
        if candidate.artifact.precision == "fp32" and candidate.result.sqnr_db < FP32_SQNR_DB_MIN:
            share = share_text(10 ** (-candidate.result.sqnr_db / 20))
            engine = candidate.artifact.engine
            findings.warn(
                f"{findings.name}: {engine}'s answers in FP32 differ from the source's by {share}, so {engine} probably "
                f"computes an operator in another way: compare its answers with your model's, or remove {engine} from the "
                "profile's engines"
            )


def specs_to_prebuild(evaluation: Evaluation, targets: Iterable[TargetRequest]) -> list[BuildSpec]:
    """Return the specs that can be built before the accuracy gate decides, each spec once.

    The reference is an FP32 artifact for the first engine. `choose` may need a different reference, because it uses
    the engine of the best candidate. It needs no reference if this candidate is FP32.
    """
    specs: dict[str, BuildSpec] = {}
    for target in targets:
        wanted = [_first_spec(evaluation.source, engine, target) for engine in target.engines]
        if target.with_reference:
            wanted.append(BuildSpec(target.engines[0], "fp32", target.profile))
        for spec in wanted:
            if accepts(evaluation.source, spec.engine):  # `choose` refuses the other engines
                specs.setdefault(spec.id, spec)
    return list(specs.values())


def check_gate(choices: Sequence[Choice], source: SourceModel) -> None:
    """Raise AccuracyTooLow if an artifact of any target did not pass. The advice depends on the source."""
    failed = [(choice, candidate) for choice in choices for candidate in choice.packed if not candidate.passed]
    if not failed:
        return
    parts = [
        f"target {choice.profile.name}: {candidate.artifact.engine} {candidate.result.loss_text()}"
        for choice, candidate in failed
    ]
    parts += [warning for choice, _ in failed for warning in choice.warnings]
    first = failed[0][1]
    limits = first.result.limits
    allowed = f"{limits.max_drop:.4f}"
    if limits.max_class_drop is not None:
        allowed += f", and {limits.max_class_drop:.4f} in any class or slice"
    offer = "allow FP16 or FP32 with --precision auto, " if first.is_int8 else ""
    advice = f"Use calibration samples that resemble the data in the field, {offer}or raise --max-drop"
    if first.is_int8 and accepts_quantization(source, engine := first.artifact.engine):  # samples have no influence
        advice = (
            f"{engine} keeps the quantization of {source.path.name} but rounds in another way: build from the float model, "
            f"remove {engine} from the profile's engines, or raise --max-drop"
        )
    in_fp32 = [
        one for choice, _ in failed for one in choice.tried if one.artifact.precision == "fp32" and not one.passed
    ]
    if in_fp32:
        engine = in_fp32[0].artifact.engine
        advice = f"{engine} fails in FP32 too, so this engine computes the model wrongly: remove {engine} from the profile's engines"
        if source.quantized:  # FP32 artifacts do not quantize activations
            advice = (
                f"{engine} fails in FP32 too, because the answers of {source.path.name} depend on its quantized activations: "
                f"build from the float model, or remove {engine} from the profile's engines"
            )
    raise AccuracyTooLow(f"{'; '.join(parts)}; the largest allowed drop is {allowed}. No bundle was written. {advice}")


def _loss_text(choice: Choice, nearest: Candidate) -> str:
    """Return the loss of an engine's best candidate, and all attempts in this engine."""
    tried = choice.tried_text(nearest.artifact.engine)
    return nearest.result.loss_text() + (f" (tried: {tried})" if tried else "")


def _measurer(findings: _Findings, measure: Measurer | None) -> Measurer | None:
    """Return the measurer of a target: the user's or, for "auto", this machine; None if neither fits."""
    target = findings.target
    if measure is None and target.is_auto:
        on_host = Measurer()
        if on_host.covers(target.profile):
            return on_host
        findings.builder.progress(
            f"{findings.name}: not timed, because this machine has another processor. INT8 counts as the fastest if it passes; "
            "--measure-on DEVICE times the candidates on a device"
        )
    elif measure is not None and not measure.covers(target.profile):
        findings.warn(f"{findings.name} is not measured: name a device of this profile with --measure-on")
        return None
    return measure


@dataclass(frozen=True)
class _EngineBuild:
    """Builds the candidates of one engine of a target, the simplest first.

    Each result is added to `findings`. `until_passed` tells whether to stop at the first candidate that passes and
    is not `is_barely_int8`; it is False if candidates are timed.
    """

    findings: _Findings
    engine: str
    budget: Budget
    until_passed: bool

    def candidates(self) -> list[Candidate]:
        """Return the candidates that were built. Raises the last error if nothing can be built."""
        builder, target = self.findings.builder, self.findings.target
        tried: list[Candidate] = []
        failures: list[EdgeRTError] = []
        for precision in target.precisions:
            try:
                spec = BuildSpec(self.engine, precision, target.profile)
                if precision == "int8":
                    for candidate in self._int8_candidates(spec):
                        tried.append(candidate)  # one by one, so that a candidate stays if a later build fails
                else:
                    tried.append(builder.build(spec))
            except CANNOT_BE_BUILT as error:
                failures.append(error)
                if precision == "int8":  # `best_recipe` has recorded the failure of each recipe
                    builder.report_failure(f"{self.findings.name}: no {self.engine} int8", error)
                else:
                    self.findings.record_failure(self.engine, precision, error)
                continue
            if self.until_passed and any(candidate.passed and not candidate.is_barely_int8 for candidate in tried):
                break
        if not tried:
            raise failures[-1]  # the last error, that of FP32 if it was tried, is the most useful one
        self.findings.tried += tried
        return tried

    def _int8_candidates(self, spec: BuildSpec) -> Iterator[Candidate]:
        """Build INT8 by its recipes. If no recipe passes, also build it with the most harmful layers in float."""
        builder, target = self.findings.builder, self.findings.target
        best, others = best_recipe(builder, spec, target.recipe, self.findings.not_built)
        yield from (best, *others)
        if not best.passed and not self.budget.is_off:
            found = self._with_float_layers(best)
            if found is not None:
                best = found
                yield best
        if not self.until_passed:
            for precision in builder_for(self.engine).timed_beside_int8:
                try:
                    yield builder.build(replace(best.spec, precision=precision))
                except CANNOT_BE_BUILT as error:  # the candidate in INT8 remains
                    self.findings.record_failure(self.engine, precision, error)

    def _with_float_layers(self, plain: Candidate) -> Candidate | None:
        """Return the candidate with the fewest layers in float that passes; warn of the outcome."""
        findings, share_min = self.findings, INT8_SHARE_MIN if self.findings.target.is_auto else 0.0
        if self.budget.spent:
            if not findings.builder.evaluation.source.quantized:
                findings.warn(
                    f"{findings.name}: {self.engine} INT8 does not pass, and earlier searches spent the budget, so there was "
                    f"no search for layers in float in {self.engine}. Repeat the build to continue, or give a larger --budget"
                )
            return None
        try:
            search = search_float_layers(findings.builder, plain, self.budget, share_min)
        except CANNOT_BE_BUILT as error:  # the plain candidate in INT8 remains
            findings.warn(
                f"{findings.name}: {self.engine} INT8 does not pass, and the search for layers in float failed: "
                f"{error.message}"
            )
            return None
        if search is None:
            return None
        findings.searches.append((self.engine, search))
        findings.warn(f"{findings.name}: {search.outcome_text()}")
        if search.found is not None and search.found.is_int8_by_name_only:  # an FP32 artifact computes the same
            return None
        return search.found


def by_preference(passed: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates in their order, except that those that are barely INT8 come last.

    If another candidate passes, one that is INT8 only by name is left out: FP32 computes the same without a loss.
    """
    useful = [candidate for candidate in passed if not candidate.is_int8_by_name_only]
    return sorted(useful or passed, key=lambda candidate: candidate.is_barely_int8)


def _first_spec(source: SourceModel, engine: str, target: TargetRequest) -> BuildSpec:
    spec = BuildSpec(engine, target.precisions[0], target.profile)
    return (
        with_recipe(spec, recipes_for(source, engine, target.profile, target.recipe)[0])
        if spec.precision == "int8"
        else spec
    )


def _sorted(candidates: Sequence[Candidate], timings: Timings) -> tuple[Candidate, ...]:
    """Return the candidates sorted by time, the fastest first; without times, in the profile's order."""
    if not timings:
        return tuple(candidates)
    waiting, ordered = list(candidates), list[Candidate]()
    while waiting:
        ordered.append(fastest(waiting, timings))
        waiting = [candidate for candidate in waiting if candidate is not ordered[-1]]
    return tuple(ordered)


def _why_not_int8(candidate: Candidate, tried: Sequence[Candidate], timings: Timings) -> str:
    engine, own = candidate.artifact.engine, timings.get(candidate.id)
    reasons = []
    for other in tried:
        if other.artifact.engine != engine or not other.is_int8:
            continue
        kind, timing = f"{other.artifact.kind.upper()} ({other.how})", timings.get(other.id)
        if not other.passed:
            reasons.append(f"{kind}: {other.result.loss_text()}")
        elif other.is_barely_int8:
            reasons.append(f"{kind} has only {share_text(other.artifact.int8_share)} of the work in INT8")
        elif own is not None and timing is not None and not timing.error:
            own_kind = candidate.artifact.kind.upper()
            reasons.append(f"{kind} took {timing.p50_ms:.4f} ms, and {own_kind} took {own.p50_ms:.4f} ms")
    reason = "; ".join(reasons) or "INT8 could not be built"
    return f"{engine} gets {candidate.artifact.kind.upper()}, not INT8: {reason}"
