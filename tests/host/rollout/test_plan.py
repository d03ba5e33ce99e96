"""A device's facts and a bundle's properties give a plan with steps, or a refusal."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgert.bundle.manifest import Accuracy
from edgert.bundle.signing import new_key
from edgert.bundle.text_rules import Text
from edgert.checks.status import ClaimStatus, DaemonState, DeviceStatus, ModelStatus
from edgert.errors import (
    DeployUnderWay,
    DeviceError,
    EdgeRTError,
    EngineMissing,
    NotCompatible,
    ReleaseTooOld,
    SignatureInvalid,
    StorageFailed,
    TransitionRefused,
)
from edgert.tensors import TensorSpec
from edgert.versions.slots import Version
from edgert.versions.trial_limits import TrialLimits
from edgert_deploy.rollout.plan import SPARE_BYTES, Offer, Step, make_plan
from edgert_deploy.rollout.request import read_offer
from tests.support.bundles import make_null_bundle
from tests.support.statuses import device_status

WHOLE_WAY = (Step.SEND, Step.INSTALL, Step.ACTIVATE, Step.CHECK, Step.MARK_GOOD)


@pytest.fixture(scope="module")
def offer(tmp_path_factory: pytest.TempPathFactory) -> Offer:
    """Return the offer of release 5 of `echo`, for profile this-machine and the null engine."""
    return read_offer(make_null_bundle(tmp_path_factory.mktemp("bundle"), new_key(), release=5))


def scored(score: float) -> Offer:
    """Return an offer of release 5 whose artifact had this score at its build."""
    with tempfile.TemporaryDirectory() as folder:
        return read_offer(make_null_bundle(Path(folder), new_key(), release=5, score=score))


def facts(offer: Offer, model: ModelStatus | None = None, **changes: Any) -> DeviceStatus:
    models = () if model is None else (model,)
    return device_status(*models, **{"keys": offer.key_ids, **changes})


def version(release: int, digest: str = "other", good: bool = True) -> Version:
    return Version(release, digest, good)


def test_the_plan_for_a_new_model_has_all_steps(offer: Offer) -> None:
    plan = make_plan(facts(offer), offer)
    assert (plan.model, plan.release, plan.digest, plan.steps) == ("echo", 5, offer.digest, WHOLE_WAY)


def test_a_model_of_text_needs_a_device_that_has_tokenizers(offer: Offer) -> None:
    before = offer.manifest
    rule = Text(before.golden_inputs[0], "x", 4)
    offer = replace(offer, manifest=replace(before, inputs=(TensorSpec("x", "INT64", (-1, 4)),), text=rule))
    with pytest.raises(
        EngineMissing, match=r"lacks the package tokenizers\. Install it: edgert bootstrap board --with text"
    ):
        make_plan(facts(offer), offer)
    assert make_plan(facts(offer, text=True), offer).steps == WHOLE_WAY


@pytest.mark.parametrize(
    ("live_scored", "metric", "warned"),
    [(0.9925, "top1", True), (0.92, "top1", False), (0.91, "top1", False), (0.9925, "cosine", False)],
)
def test_a_release_that_scored_less_than_the_live_one_is_reported(
    live_scored: float, metric: str, warned: bool
) -> None:
    """The accuracy gate compares an artifact only with its own source, and the source may be worse."""
    offer = scored(0.91)
    accuracy = Accuracy(metric, 400, live_scored, live_scored, 0.01)
    model = ModelStatus("echo", "steady", version(4), None, ratchet=4, accuracy=accuracy)
    plan = make_plan(facts(offer, model), offer)
    assert plan.steps == WHOLE_WAY, "a warning refuses nothing: the samples may be others"
    told = (
        "release 5 of echo scored 0.9100 at its build (top1, 2 samples); release 4, live before, scored 0.9925 "
        "(400 samples)"
    )
    assert plan.warning == (told if warned else "")
    live = replace(model, live=version(5, offer.digest))
    assert make_plan(facts(offer, live), offer).warning == "", "it is live already"


def test_a_daemon_that_does_not_run_is_started_first(offer: Offer) -> None:
    assert make_plan(facts(offer, daemon=DaemonState(False)), offer).steps == (Step.START, *WHOLE_WAY)


@pytest.mark.parametrize(
    ("state", "active", "spare", "steps"),
    [
        ("steady", ("other", 4, True), None, WHOLE_WAY),
        (
            "steady",
            ("other", 5, True),
            None,
            WHOLE_WAY,
        ),  # the device decides whether the same number may have other content
        ("steady", ("other", 4, True), ("same", 5, True), WHOLE_WAY),
        ("staged", ("other", 4, True), ("other", 3, False), WHOLE_WAY),
        ("staged", ("other", 4, True), ("same", 5, False), WHOLE_WAY[2:]),
        ("first-staged", None, ("same", 5, False), WHOLE_WAY[2:]),
        ("trial", ("same", 5, False), ("other", 4, True), WHOLE_WAY[3:]),
        ("first-trial", ("same", 5, False), None, WHOLE_WAY[3:]),
        ("steady", ("same", 5, True), ("other", 4, True), ()),
    ],
)
def test_the_plan_continues_from_the_state_of_the_slots(
    offer: Offer, state: str, active: Any, spare: Any, steps: tuple[Step, ...]
) -> None:
    def described(slot: Any) -> Version | None:
        return slot and Version(slot[1], offer.digest if slot[0] == "same" else "other", slot[2])

    model = ModelStatus("echo", state, described(active), described(spare), ratchet=4)
    assert make_plan(facts(offer, model), offer).steps == steps


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"keys": ("0123456789abcdef",)}, SignatureInvalid, "trusts 0123456789abcdef"),
        ({"keys": ()}, SignatureInvalid, "trusts none"),
        ({"profile": "jetson-orin-nano"}, NotCompatible, "jetson-orin-nano"),
        ({"engines": {"tflite": "2.3"}}, EngineMissing, "null"),
        ({"disk_free_bytes": SPARE_BYTES}, StorageFailed, "Nothing was sent"),
    ],
)
def test_a_bundle_that_the_device_would_refuse_is_refused_before_a_byte_is_sent(
    offer: Offer, changes: dict[str, Any], error: type[EdgeRTError], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_plan(facts(offer, **changes), offer)


def test_another_processor_than_the_targets_is_refused(offer: Offer) -> None:
    targets = (replace(offer.manifest.targets[0], machines=("x86_64",)),)
    for_x86 = replace(offer, manifest=replace(offer.manifest, targets=targets))
    assert make_plan(facts(offer, machine="x86_64"), for_x86).steps
    with pytest.raises(NotCompatible, match="aarch64"):
        make_plan(facts(offer), for_x86)


def test_an_older_release_is_refused_unless_it_is_signed_as_a_downgrade(offer: Offer) -> None:
    newer = ModelStatus("echo", "steady", version(6), None, ratchet=6)
    with pytest.raises(ReleaseTooOld, match=r"--downgrade-from 6$"):
        make_plan(facts(offer, newer), offer)
    replaced = replace(newer, spare=Version(5, offer.digest, True))
    with pytest.raises(ReleaseTooOld, match=r"--release 7.*; edgert rollback echo .* makes it live again$"):
        make_plan(facts(offer, replaced), offer)
    signed = replace(offer.manifest, downgrade_from=6, expires="2027-02-19T08:00:00Z", signed_at="2026-11-21T08:00:00Z")
    way_back = replace(offer, manifest=signed)
    assert make_plan(facts(offer, newer), way_back).steps == WHOLE_WAY
    with pytest.raises(ReleaseTooOld, match="--downgrade-from 8"):
        make_plan(facts(offer, replace(newer, ratchet=8)), way_back)


def test_a_deployment_during_the_trial_of_another_version_is_refused(offer: Offer) -> None:
    busy = ModelStatus("echo", "trial", version(4, good=False), version(3), ratchet=3)
    with pytest.raises(TransitionRefused, match="edgert rollback echo board"):
        make_plan(facts(offer, busy), offer)


def test_during_a_trial_that_another_deployment_watches_the_advice_is_to_wait(offer: Offer) -> None:
    """The device refuses a rollback while the deployment holds its claim."""
    claims = (ClaimStatus("echo", "ann@desk", "2026-11-22 09:00:00 +0000", 60.0),)
    busy = ModelStatus("echo", "trial", version(4, good=False), version(3), ratchet=3)
    same = ModelStatus("echo", "trial", Version(5, offer.digest, False), version(3), ratchet=3)
    for model, limits in ((busy, None), (same, LIMITS)):
        there = facts(offer, model, claims=claims, limits_format=1, temp_c=41.0)
        with pytest.raises(DeployUnderWay, match=r"by ann@desk since 2026-.*: wait for the end") as caught:
            make_plan(there, offer, limits)
        assert "rollback" not in caught.value.message


def test_an_older_release_is_refused_during_a_trial_as_well(offer: Offer) -> None:
    busy = ModelStatus("echo", "trial", version(7, good=False), version(6), ratchet=6)
    with pytest.raises(ReleaseTooOld):
        make_plan(facts(offer, busy), offer)


def test_a_device_without_the_preferred_engine_gets_the_next_engine(offer: Offer) -> None:
    first = replace(offer.manifest.artifacts[0], id="first", engine="openvino")
    preferred = replace(
        offer.manifest,
        artifacts=(first, offer.manifest.artifacts[0]),
        targets=(replace(offer.manifest.targets[0], artifacts=("first", "null")),),
    )
    assert make_plan(facts(offer), replace(offer, manifest=preferred)).steps == WHOLE_WAY


LIMITS = TrialLimits({"p99_ms": 8.0, "temp_c": 80.0, "agreement": 0.9}, 600.0)


def test_limits_add_the_step_watch_and_an_unattended_trial_omits_the_step_mark_good(offer: Offer) -> None:
    there = facts(offer, limits_format=1, temp_c=41.0)
    assert make_plan(there, offer, LIMITS).steps == (*WHOLE_WAY[:4], Step.WATCH, Step.MARK_GOOD)
    assert make_plan(there, offer, replace(LIMITS, unattended=True)).steps == (*WHOLE_WAY[:4], Step.WATCH)


def test_limits_that_a_device_cannot_watch_are_refused_before_anything_is_sent(offer: Offer) -> None:
    with pytest.raises(DeviceError, match="watches no limits"):
        make_plan(facts(offer, limits_format=0, temp_c=41.0), offer, LIMITS)
    with pytest.raises(TransitionRefused, match="no readable thermometer"):
        make_plan(facts(offer, limits_format=1), offer, LIMITS)


def test_a_trial_in_progress_continues_only_with_its_own_limits(offer: Offer) -> None:
    def on_trial(limits: TrialLimits | None, state: str = "trial") -> DeviceStatus:
        active = Version(5, offer.digest, False)
        return facts(offer, ModelStatus("echo", state, active, None, 4, limits), limits_format=1, temp_c=41.0)

    rest = (Step.CHECK, Step.WATCH, Step.MARK_GOOD)
    begun = replace(LIMITS, started=True)
    for asked in (None, LIMITS):
        plan = make_plan(on_trial(begun), offer, asked)
        assert (plan.steps, plan.limits and plan.limits.bounds) == (rest, LIMITS.bounds)
    without = replace(begun, bounds={"p99_ms": 8.0, "temp_c": 80.0})
    assert make_plan(on_trial(without, "first-trial"), offer, LIMITS).steps == rest, "nothing to agree with"
    for other in (None, without):
        with pytest.raises(TransitionRefused, match="under other limits"):
            make_plan(on_trial(other), offer, LIMITS)
