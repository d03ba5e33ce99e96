"""The search for mixed precision: if plain INT8 loses too much, the most harmful layers stay in float.

docs/accuracy-reference.md describes the search. The search ends at the latest when its budget is spent. The budget
counts builds, so the result does not depend on the speed of the machine. Each measurement is saved at once, and
artifacts in the build cache take nothing from the budget. So if the same build runs again, its search continues.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from edgert.durable import replace_file
from edgert.errors import BuildFailed, EngineFailed
from edgert.printable import counted
from edgert_deploy.common.quantities import share_text
from edgert_deploy.packager.accuracy.metrics import SQNR_DB_MAX
from edgert_deploy.packager.accuracy.sensitivity import Harm, worst_first
from edgert_deploy.packager.builders import BuildSpec, builder_for
from edgert_deploy.packager.builders.layers import Layer
from edgert_deploy.packager.builders.qdq import HEAVY_OPS, HEAVY_RECIPES, Recipe
from edgert_deploy.packager.candidates.candidate import Candidate, CandidateBuilder
from edgert_deploy.packager.candidates.search_progress import SearchProgress, attempts_max, next_count

LAYERS_PER_BUILD = 50  # a search measures this many layers for each build that is left in the budget


@dataclass
class Budget:
    """The number of artifacts that all searches of a build may still build; `given` is the user's number."""

    builds: int
    given: int = field(init=False)

    def __post_init__(self) -> None:
        self.given = self.builds

    @property
    def is_off(self) -> bool:
        """Whether the user turned the searches off."""
        return self.given <= 0

    @property
    def spent(self) -> bool:
        return self.builds <= 0


@dataclass(frozen=True)
class Attempt:
    """An attempt with some layers in float.

    Attributes:
        count: The number of layers in float. These are the most harmful layers.
        drop: The drop of the artifact; None if the artifact could not be built.
        share: The share of the work in INT8; None if the share is unknown.
    """

    count: int
    passed: bool
    drop: float | None
    share: float | None = None


@dataclass(frozen=True)
class Search:
    """The outcome of a search. `plain` has no layers in float; `found` is the candidate that passed."""

    plain: Candidate
    found: Candidate | None
    harms: tuple[Harm, ...]
    attempts: tuple[Attempt, ...]
    budget_spent: bool

    def outcome_text(self) -> str:
        engine = self.plain.spec.engine
        layers, attempts = len(self.harms), len(self.attempts)
        if self.found is not None:
            names = self.found.artifact.float_layers
            more = "; the budget ended the search for fewer layers" if self.budget_spent else ""
            if self.found.is_barely_int8:
                share = share_text(self.found.artifact.int8_share)
                if self.found.is_int8_by_name_only:
                    more += "; nothing is left in INT8, so this artifact is not packed"
                else:
                    more += (
                        f"; {share} of the work is left in INT8, so --precision auto packs it only if it is the fastest"
                    )
            return (
                f"{engine} INT8 passes with {len(names)} of {counted(layers, 'layer')} in float, the most harmful first: "
                f"{', '.join(names)} (with no layer in float: {self.plain.result.loss_text()}){more}"
            )
        if self.budget_spent:
            return (
                f"the budget ended the search: in {engine}, it tried {counted(attempts, 'set')} of the "
                f"{counted(layers, 'layer')} in float, and none passed. Repeat the build to continue, or give a larger --budget"
            )
        if not attempts:
            return f"{engine} INT8 does not pass, and with the most harmful layer in float, no layer would be in INT8"
        most = max((attempt.count for attempt in self.attempts), default=0)
        if any(attempt.passed for attempt in self.attempts):
            return (
                f"{engine} INT8 passes only with so many of {counted(layers, 'layer')} in float that INT8 gains little"
            )
        return f"{engine} INT8 does not pass with up to {most} of {counted(layers, 'layer')} in float either"


def search_float_layers(
    builder: CandidateBuilder, plain: Candidate, budget: Budget, share_min: float = 0.0
) -> Search | None:
    """Search for the fewest layers in float with which the model passes.

    The search ends if less than `share_min` of the work is in INT8. Return None if the source is quantized already.
    Raises BuildFailed if the source is not ONNX, or if the budget is too small for the number of layers.
    """
    source = builder.evaluation.source
    if source.quantized:  # the build keeps the user's own quantization
        return None
    if source.proto is None:
        raise BuildFailed(
            f"it needs an ONNX graph, and {source.path.name} is a TFLite model. Give the ONNX or Keras model from which it "
            "was converted"
        )
    search = _LayerSearch(builder, plain.spec, budget, share_min)
    harms = search.measured(builder.processes.layers())
    found, spent = search.fewest(worst_first(harms))
    return Search(plain, found, harms, tuple(search.attempts), spent)


class _LayerSearch:
    """A search in one engine: the measurements first, then the builds. `spec` has no layers in float."""

    def __init__(self, builder: CandidateBuilder, spec: BuildSpec, budget: Budget, share_min: float) -> None:
        self.attempts: list[Attempt] = []
        self._builder = builder
        self._spec = spec
        self._budget = budget
        self._share_min = share_min
        self._name = spec.profile.name
        self._progress = SearchProgress(builder.progress, self._name)

    def measured(self, layers: Sequence[Layer]) -> tuple[Harm, ...]:
        recipe = _recipe(self._builder, self._spec)
        saved = _SavedHarms(self._builder, self._spec, recipe)
        missing = [layer for layer in layers if layer.name not in saved.harms]
        self._check_budget(len(missing))
        if missing:
            self._builder.progress(
                f"{self._name}: measuring the harm of INT8 in {counted(len(layers), 'layer')}, to leave the worst in float "
                "(--budget 0 skips this search; after Ctrl-C, the next build continues it)"
            )
        self._progress.begin()
        for number, layer in enumerate(missing, start=1):
            saved.add(self._builder.processes.harm(layer, recipe))
            self._progress.measured(number, len(missing))
        return tuple(Harm(layer, saved.harms[layer.name]) for layer in layers)

    def _check_budget(self, layers: int) -> None:
        """Refuse to measure more layers than the budget allows, because this can take longer than all builds."""
        needed, left = -(-layers // LAYERS_PER_BUILD), self._budget.builds
        if needed > left:
            raise BuildFailed(
                f"it first measures the harm of INT8 in {counted(layers, 'layer')}, and the rest of the budget allows "
                f"{left * LAYERS_PER_BUILD}. Give --budget {self._budget.given - left + needed} or more"
            )

    def fewest(self, worst: Sequence[Layer]) -> tuple[Candidate | None, bool]:
        """Return the passing candidate with the fewest layers in float, and whether the budget ran out.

        `worst` are the layers, the most harmful first.
        """
        fails = 0  # the largest number of layers in float that is known to fail
        passes = 0  # the smallest number of layers in float that is known to pass; 0 if none is known
        most = len(worst) - 1  # with all layers in float, nothing would be INT8
        self._progress.begin()
        while most > 0 and passes != fails + 1:
            if not passes and fails == most:
                return None, False
            count = next_count(fails, passes, most)
            spec = self._with_float(worst[:count])
            left_max = attempts_max(fails, passes, most)
            if not self._builder.processes.is_cached(spec):
                if self._budget.spent:
                    break
                left_max = min(left_max, self._budget.builds)
                self._budget.builds -= 1
            attempt = self._attempt(spec, left_max)
            self.attempts.append(attempt)
            if attempt.passed:
                passes = count
            elif attempt.share is not None and attempt.share < self._share_min:
                return None, False
            else:
                fails = count
        spent = most > 0 and passes != fails + 1
        return (self._builder.build(self._with_float(worst[:passes])) if passes else None), spent

    def _attempt(self, spec: BuildSpec, left_max: int) -> Attempt:
        count = len(spec.float_layers)
        names = ", ".join(layer.name for layer in spec.float_layers[:5]) + (", ..." if count > 5 else "")
        self._progress.candidate(f"{spec.engine} INT8 with {counted(count, 'layer')} in float ({names})", left_max)
        try:
            built = self._builder.build(spec)
        except (BuildFailed, EngineFailed) as error:
            self._builder.progress(f"{self._name}: {error.message}")
            return Attempt(count, passed=False, drop=None)
        return Attempt(count, built.passed, built.result.accuracy.drop, built.artifact.int8_share)

    def _with_float(self, layers: Sequence[Layer]) -> BuildSpec:
        # The layers stay sorted by harm, because the cache's key and the receipt contain them in this order.
        return replace(self._spec, float_layers=tuple(layers))


def _recipe(builder: CandidateBuilder, spec: BuildSpec) -> Recipe:
    """Return the Q/DQ recipe that is nearest to the quantization of `spec`."""
    recipe = builder_for(spec.engine).recipe(builder.evaluation.source, spec.profile)
    return replace(recipe, ops=HEAVY_OPS) if spec.recipe in HEAVY_RECIPES else recipe


class _SavedHarms:
    """The harms of layers, in a file beside the cache. If it is unusable, they are measured again."""

    def __init__(self, builder: CandidateBuilder, spec: BuildSpec, recipe: Recipe) -> None:
        key = builder.processes.key(spec, recipe)
        self._file = builder.cache.folder.with_name("search") / f"{key}.harms.json"
        self.harms: dict[str, float] = {}
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            self.harms = {str(k): float(v) for k, v in json.loads(self._file.read_bytes()).items()}

    def add(self, harm: Harm) -> None:
        self.harms[harm.layer.name] = round(harm.sqnr_db, 4) if harm.sqnr_db < SQNR_DB_MAX else SQNR_DB_MAX
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(self._file, json.dumps(self.harms).encode(), durable=False, shared=True)
