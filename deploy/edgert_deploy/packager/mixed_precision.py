"""The fallback: where plain INT8 loses too much, the layers that do most harm go back to float until the gate passes.

The layers are sorted by their harm (sensitivity.py). 1, 2, 4 ... of the worst are put into float, each set built and
judged in the engine itself, until one passes; then the number is halved towards the last that failed. So a model of
n layers takes about 2 log2(n) builds, and the fewest layers that pass are kept.

It ends with its budget. All that was measured is kept in a file as it comes, so that the same build, run again, goes
on where it stopped (also after Ctrl-C).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edgert.durable import replace_file
from edgert.errors import BuildFailed, EngineFailed
from edgert_deploy.packager.accuracy.metrics import SQNR_DB_MAX, USERS_OWN
from edgert_deploy.packager.accuracy.sensitivity import Harm, Sensitivity, recipe_like, worst_first
from edgert_deploy.packager.build_cache import cache_key
from edgert_deploy.packager.builders.layers import Layer, layers_of
from edgert_deploy.packager.builders.qdq import prepared
from edgert_deploy.packager.candidates import Candidate, Order, Workshop

FORMAT = 1


@dataclass
class Budget:
    """How long all fallbacks of a build may take together, in seconds; it starts with the first."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    _until: float | None = field(default=None, init=False)

    @property
    def spent(self) -> bool:
        if self._until is None:
            self._until = self.clock() + self.seconds
        return self.clock() >= self._until


@dataclass(frozen=True)
class Trial:
    """The `count` most harmful layers in float: whether it passed, and what it lost. `drop` None: it cannot be built."""

    count: int
    passed: bool
    drop: float | None


@dataclass(frozen=True)
class Fallback:
    """What came of it. `found` is None where nothing passed; `spent`: the budget ended it before it was through."""

    found: Candidate | None
    harms: tuple[Harm, ...]
    trials: tuple[Trial, ...]
    spent: bool


def fall_back(shop: Workshop, plain: Candidate, budget: Budget) -> Fallback | None:
    """Search for the fewest layers in float with which `plain` passes. None for a model whose layers cannot be told."""
    source = shop.brief.source
    if source.proto is None or source.quantised:  # what the user quantised is kept as it is
        return None
    proto = prepared(source)
    layers = layers_of(proto)
    memory = _Memory(shop, plain.order, layers)
    harms = _measured(shop, plain.order, proto, layers, memory, budget)
    if len(harms) < len(layers):
        return Fallback(None, harms, (), spent=True)
    worst = worst_first(harms)
    found, spent = _search(shop, plain.order, worst, memory, budget)
    return Fallback(found, harms, tuple(memory.trials), spent)


def _measured(
    shop: Workshop, order: Order, proto: Any, layers: Sequence[Layer], memory: _Memory, budget: Budget
) -> tuple[Harm, ...]:
    """The harm of each layer, or of as many as the budget lets."""
    missing = [layer for layer in layers if layer.name not in memory.harms]
    if missing:
        shop.progress(f"{order.profile.name}: measuring what INT8 does in each of {len(layers)} layers")
    recipe = recipe_like(order.engine, shop.brief.source, order.profile)
    sensitivity = Sensitivity(proto, shop.brief.calibration, recipe)
    for number, layer in enumerate(missing, start=1):
        if budget.spent:
            break
        memory.keep_harm(sensitivity.of(layer))
        if number % 10 == 0:
            shop.progress(f"{order.profile.name}: {number} of {len(missing)} layers measured")
    return tuple(Harm(layer, memory.harms[layer.name]) for layer in layers if layer.name in memory.harms)


def _search(
    shop: Workshop, order: Order, worst: Sequence[Layer], memory: _Memory, budget: Budget
) -> tuple[Candidate | None, bool]:
    """The fewest of `worst` that pass, and whether the budget ended the search."""
    fails, passes = 0, 0  # counts of layers; all known below and at `fails` fail; 0 in `passes`: none known
    most = len(worst) - 1  # with all of them in float nothing would be INT8
    while most > 0 and passes != fails + 1:
        if passes:
            count = (fails + passes) // 2
        elif fails == most:
            return None, False
        else:
            count = min(max(1, 2 * fails), most)
        known = memory.trial(count)
        if known is None:
            if budget.spent:
                break
            known = _try(shop, order, worst, count)
            memory.keep_trial(known)
        if known.passed:
            passes = count
        else:
            fails = count
    spent = most > 0 and passes != fails + 1
    return (shop.make(_with(order, worst, passes)) if passes else None), spent


def _try(shop: Workshop, order: Order, worst: Sequence[Layer], count: int) -> Trial:
    names = ", ".join(layer.name for layer in worst[:count][:5]) + (", ..." if count > 5 else "")
    shop.progress(f"{order.profile.name}: {order.engine} INT8 with {count} of {len(worst)} layers in float ({names})")
    try:
        verdict = shop.make(_with(order, worst, count)).verdict
    except (BuildFailed, EngineFailed) as error:
        shop.progress(f"{order.profile.name}: {error.message}")
        return Trial(count, passed=False, drop=None)
    return Trial(count, verdict.passed, verdict.accuracy.drop)


def _with(order: Order, worst: Sequence[Layer], count: int) -> Order:
    # In the order of their harm: the cache's key and the receipt say which came first.
    return Order(order.engine, order.precision, order.profile, tuple(worst[:count]))


class _Memory:
    """What was measured, kept in files as it comes. A file that cannot be read or written is none: it costs time only."""

    def __init__(self, shop: Workshop, order: Order, layers: Sequence[Layer]) -> None:
        brief, self._layers = shop.brief, layers
        recipe = recipe_like(order.engine, brief.source, order.profile)
        made_of = cache_key("sensitivity", brief.source, brief.calibration, order.profile, "int8", asdict(recipe))
        own = cache_key(order.engine, brief.source, brief.calibration, order.profile, "int8")
        judged = _digest(
            own, made_of, _holdout_digest(shop), repr(brief.limits), brief.metric.name, repr(brief.question.detect)
        )
        folder = shop.cache.folder.with_name("search")
        self._harms_file, self._trials_file = folder / f"{made_of}.harms.json", folder / f"{judged}.trials.json"
        self.harms = {str(k): float(v) for k, v in _read(self._harms_file).items()}
        # A metric of the user's own may have changed since.
        kept = [] if USERS_OWN.fullmatch(brief.metric.name) else _read(self._trials_file).get("trials", [])
        self.trials = [Trial(int(t["count"]), bool(t["passed"]), t["drop"]) for t in kept]

    def keep_harm(self, harm: Harm) -> None:
        self.harms[harm.layer.name] = round(harm.sqnr_db, 4) if harm.sqnr_db < SQNR_DB_MAX else SQNR_DB_MAX
        _write(self._harms_file, self.harms)

    def trial(self, count: int) -> Trial | None:
        return next((trial for trial in self.trials if trial.count == count), None)

    def keep_trial(self, trial: Trial) -> None:
        self.trials.append(trial)
        _write(self._trials_file, {"trials": [asdict(trial) for trial in self.trials]})


def _holdout_digest(shop: Workshop) -> str:
    holdout = shop.brief.question.holdout
    arrays = [*(holdout.inputs[name] for name in sorted(holdout.inputs)), holdout.labels, holdout.slices, holdout.boxes]
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(b"none" if array is None else repr((array.dtype.str, array.shape)).encode() + array.tobytes())
    return digest.hexdigest()


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError):
        return {}


def _write(path: Path, value: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, json.dumps(value).encode(), durable=False, shared=True)
