"""The recipes of INT8: the build tries an engine's recipes in turn until one loses very little."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgert.errors import BuildFailed, EdgeRTError, EngineFailed, OperatorUnsupported
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import FIRST_RECIPE, BuildSpec, accepts, accepts_quantization, builder_for
from edgert_deploy.packager.candidates.candidate import Candidate, CandidateBuilder
from edgert_deploy.packager.sources.source_model import SourceModel

# EngineFailed: a quantizer may write a file that its own engine cannot load.
CANNOT_BE_BUILT = (BuildFailed, EngineFailed, OperatorUnsupported)
# A recipe that loses at most this share of the limit ends the search, because a later recipe can gain very little.
GOOD_SHARE = 0.25


@dataclass(frozen=True)
class NotBuilt:
    """A recipe of INT8, or another precision, that could not be built, and the reason."""

    engine: str
    how: str
    reason: str


def best_recipe(
    builder: CandidateBuilder, spec: BuildSpec, pinned: str, not_built: list[NotBuilt]
) -> tuple[Candidate, list[Candidate]]:
    """Build INT8 by one recipe after another until the loss is very small.

    Returns the best candidate, and the other candidates that were built. Raises the first error if no recipe can be
    built.

    Args:
        spec: The artifact, without a recipe.
        pinned: The only recipe to try in an engine that has this recipe. With "", all recipes are tried.
        not_built: Gets each recipe that cannot be built.
    """
    name = spec.profile.name
    built: list[Candidate] = []
    failures: list[EdgeRTError] = []
    for recipe in recipes_for(builder.evaluation.source, spec.engine, spec.profile, pinned):
        try:
            built.append(builder.build(with_recipe(spec, recipe)))
        except CANNOT_BE_BUILT as error:
            builder.report_failure(f"{name}: no {spec.engine} int8 ({recipe})", error)
            failures.append(error)
            not_built.append(NotBuilt(spec.engine, recipe, error.message))
            continue
        result = built[-1].result
        if (
            result.passed
            and not built[-1].is_barely_int8
            and result.accuracy.drop <= GOOD_SHARE * result.limits.max_drop
        ):
            break
        builder.progress(f"{name}: {spec.engine} INT8 ({recipe}): {result.loss_text()}")
    if not built:
        raise failures[0]
    best = min(built, key=_rank)
    return best, [candidate for candidate in built if candidate is not best]


def _rank(candidate: Candidate) -> tuple[bool, bool, bool, float]:
    """Return a key that sorts candidates, the best first.

    Candidates that pass come first: full INT8, and then partly float. Candidates that fail follow. Each of these groups
    is sorted by its loss. Candidates that pass only because almost nothing is in INT8 come last, because mixed
    precision may do better with a recipe that failed.
    """
    passed = candidate.passed
    partly = passed and candidate.artifact.is_partly_float
    return not passed or candidate.is_barely_int8, passed, partly, candidate.result.accuracy.drop


def recipes_for(source: SourceModel, engine: str, profile: DeviceProfile, pinned: str) -> tuple[str, ...]:
    """Return the recipes to try: only `pinned` if the engine has this recipe."""
    maker = builder_for(engine)
    if accepts_quantization(source, engine) or not accepts(source, engine):
        return (FIRST_RECIPE,)
    return (pinned,) if pinned in maker.all_recipes else maker.recipes(source, profile)


def with_recipe(spec: BuildSpec, recipe: str) -> BuildSpec:
    return replace(spec, recipe="" if recipe == FIRST_RECIPE else recipe)
