"""The recipes of INT8, tried in turn in one engine until one loses next to nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgert.errors import BuildFailed, EdgeRTError, EngineFailed, OperatorUnsupported
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import FIRST_RECIPE, BuildSpec, accepts, accepts_quantization, builder_for
from edgert_deploy.packager.candidates.candidate import Candidate, CandidateBuilder
from edgert_deploy.packager.sources.source_model import SourceModel

# EngineFailed: a quantizer may write a file that its own engine does not load.
CANNOT_BE_BUILT = (BuildFailed, EngineFailed, OperatorUnsupported)
# A recipe that loses at most this share of the limit ends the search; a later one could hardly do better.
GOOD_SHARE = 0.25


@dataclass(frozen=True)
class NotBuilt:
    """A recipe of INT8, or another precision, that an engine's tools refused, and why."""

    engine: str
    how: str
    reason: str


def best_recipe(
    builder: CandidateBuilder, spec: BuildSpec, pinned: str, not_built: list[NotBuilt]
) -> tuple[Candidate, list[Candidate]]:
    """Try recipes until INT8 loses next to nothing; return the best, and the others that were built.

    An engine that has the `pinned` recipe tries no other. Raises the first error if none can be built.
    """
    name = spec.profile.name
    built: list[Candidate] = []
    failures: list[EdgeRTError] = []
    for recipe in recipes_for(builder.evaluation.source, spec.engine, spec.profile, pinned):
        try:
            built.append(builder.build(with_recipe(spec, recipe)))
        except CANNOT_BE_BUILT as error:
            builder.tell_failure(f"{name}: no {spec.engine} int8 ({recipe})", error)
            failures.append(error)
            not_built.append(NotBuilt(spec.engine, recipe, error.message))
            continue
        result = built[-1].result
        if result.passed and built[-1].is_worth_it and result.accuracy.drop <= GOOD_SHARE * result.limits.max_drop:
            break
        builder.progress(f"{name}: {spec.engine} INT8 ({recipe}): {result.loss()}")
    if not built:
        raise failures[0]
    best = min(built, key=_rank)
    return best, [candidate for candidate in built if candidate is not best]


def _rank(candidate: Candidate) -> tuple[bool, bool, bool, float]:
    """Sort passing candidates first, among them full INT8 before partly float, then by the loss.

    Candidates that pass only because almost nothing is in INT8 come last; mixed precision may do better with a recipe
    that failed.
    """
    passed = candidate.passed
    partly = passed and candidate.artifact.is_partly_float
    return not (passed and candidate.is_worth_it), passed, partly, candidate.result.accuracy.drop


def recipes_for(source: SourceModel, engine: str, profile: DeviceProfile, pinned: str) -> tuple[str, ...]:
    """Return the recipes to try: the `pinned` one alone if the engine has it."""
    maker = builder_for(engine)
    if accepts_quantization(source, engine) or not accepts(source, engine):
        return (FIRST_RECIPE,)
    return (pinned,) if pinned in maker.all_recipes else maker.recipes(source, profile)


def with_recipe(spec: BuildSpec, recipe: str) -> BuildSpec:
    return replace(spec, recipe="" if recipe == FIRST_RECIPE else recipe)
