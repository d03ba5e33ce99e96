"""The choice: which candidates a target gets, one for each engine of its ladder, the best first.

A precision that is asked for is kept: "int8" is INT8, where need be with some layers in float, or an error that
offers the others. "auto" takes what passes, INT8 first, and says so loudly where it is anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from edgert.errors import AccuracyTooLow, BuildFailed, ConfigInvalid, EdgeRTError, EngineMissing, OperatorUnsupported
from edgert_deploy.builders import Precision
from edgert_deploy.candidates import Candidate, Order, Workshop
from edgert_deploy.profiles import DeviceProfile
from edgert_deploy.source import check_engine

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
    """What `profile` gets: `ladder`, best first; `tried`, every candidate that was looked at for it.

    Where the first engine has none that passes, `ladder` holds the one that came nearest, and the gate fails.
    """

    profile: DeviceProfile
    ladder: tuple[Candidate, ...]
    tried: tuple[Candidate, ...]
    left_out: tuple[LeftOut, ...] = ()
    remarks: tuple[str, ...] = ()


def choose(shop: Workshop, profile: DeviceProfile, asked: Asked, engines: Sequence[str]) -> Choice:
    """Build and judge for `engines`, the first of which must do: raises OperatorUnsupported, BuildFailed and their kin."""
    choice = Choice(profile, (), ())
    for rung, engine in enumerate(engines):
        try:
            check_engine(shop.brief.source, engine, profile.name)
            tried = _tried(shop, profile, asked, engine)
        except (ConfigInvalid, OperatorUnsupported, BuildFailed, EngineMissing) as error:
            if rung == 0:
                raise
            choice = _without(shop, choice, engine, error)
            continue
        best = _best(tried)
        choice = replace(choice, tried=(*choice.tried, *tried))
        if rung and not best.verdict.passed:
            choice = _without(shop, choice, engine, AccuracyTooLow(best.verdict.complaint()))
            continue
        choice = replace(choice, ladder=(*choice.ladder, best))
        if asked == "auto" and best.artifact.kind != "int8" and best.verdict.passed:
            choice = _remarked(
                shop, choice, f"{profile.name}: {engine} gets {best.artifact.kind.upper()}, not INT8: {_why(tried)}"
            )
    return choice


def _tried(shop: Workshop, profile: DeviceProfile, asked: Asked, engine: str) -> tuple[Candidate, ...]:
    """The candidates of one engine, up to the first that passes. Raises what the first said where none can be built."""
    tried: list[Candidate] = []
    failures: list[EdgeRTError] = []
    for precision in PRECISIONS_OF[asked]:
        try:
            tried.append(shop.make(Order(engine, precision, profile)))
        except (BuildFailed, OperatorUnsupported) as error:
            shop.progress(f"{profile.name}: no {engine} {precision}: {error.message}")
            failures.append(error)
            continue
        if tried[-1].verdict.passed:
            break
    if not tried:
        raise failures[0]
    return tuple(tried)


def _best(tried: Sequence[Candidate]) -> Candidate:
    """The first that passes, else the one that lost least."""
    passed = [candidate for candidate in tried if candidate.verdict.passed]
    return passed[0] if passed else min(tried, key=lambda candidate: candidate.verdict.accuracy.drop)


def _why(tried: Sequence[Candidate]) -> str:
    return "; ".join(f"{c.artifact.kind.upper()}: {c.verdict.complaint()}" for c in tried if not c.verdict.passed)


def _without(shop: Workshop, choice: Choice, engine: str, error: EdgeRTError) -> Choice:
    left_out = LeftOut(engine, error.code, error.message)
    choice = _remarked(shop, choice, f"{choice.profile.name} goes without {engine}: {error.message}")
    return replace(choice, left_out=(*choice.left_out, left_out))


def _remarked(shop: Workshop, choice: Choice, remark: str) -> Choice:
    shop.progress(f"warning: {remark}")
    return replace(choice, remarks=(*choice.remarks, remark))
