"""The shadow compares sampled answers with the reference, delays no request, and raises an alarm."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.errors import BundleError, EngineFailed, Unavailable
from edgert.worker.shadow.agreement import Agreement
from edgert.worker.shadow.shadow import ALARM_MIN, RECENT_MAX, RESTART_S, ReferenceProcess, Shadow
from edgert.worker_link.load_message import LoadMessage
from tests.support.devices import WAIT_S_MAX, Device, a_device, wait_until

ITEM = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
GOOD, BAD = Agreement(True, 1.0), Agreement(False, 0.5)


class FixedReference:
    """Returns `answer`. Comparisons wait for `gate`, and the next `fails` comparisons fail."""

    def __init__(self) -> None:
        self.answer = GOOD
        self.fails = self.opened = self.closed = self.asked = 0
        self.gate: threading.Event | None = None

    def open(self) -> FixedReference:
        self.opened += 1
        return self

    def compare(self, inputs: list[NDArray[Any]], outputs: list[NDArray[Any]]) -> Agreement:
        self.asked += 1
        if self.gate is not None:
            assert self.gate.wait(WAIT_S_MAX)
        if self.fails:
            self.fails -= 1
            raise Unavailable("gone")
        return self.answer

    def close(self) -> None:
        self.closed += 1


def a_shadow(share: float = 1.0, alarm: float = 0.9) -> tuple[Shadow, FixedReference, list[str], list[float]]:
    reference, said, now = FixedReference(), [], [0.0]

    def notify(event: str, fields: Mapping[str, float]) -> None:
        said.append(event)
        assert all(isinstance(value, (int, float)) for value in fields.values()), "telemetry is flat"

    return Shadow(reference.open, share, alarm, notify, choose=lambda: 0.5, clock=lambda: now[0]), reference, said, now


def test_only_sampled_requests_are_compared_with_the_reference() -> None:
    for share, drawn in ((0.4, 0), (0.6, 1)):
        shadow, reference, _, _ = a_shadow(share)
        shadow.start()
        shadow.offer([ITEM], [ITEM])
        wait_until(lambda r=reference, n=drawn: r.asked == n, "it is compared or not")  # type: ignore[misc]
        assert shadow.dropped == 0


def test_a_busy_reference_delays_no_request_and_the_dropped_requests_are_counted() -> None:
    shadow, reference, _, _ = a_shadow()
    reference.gate = threading.Event()
    shadow.start()
    shadow.offer([ITEM], [ITEM])
    wait_until(lambda: reference.asked == 1, "the reference is busy")
    for _ in range(10):
        shadow.offer([ITEM], [ITEM])  # the test is that this call returns
    assert shadow.dropped == 9
    reference.gate.set()
    wait_until(lambda: shadow.sampled == 2, "the one that waited is compared")


def test_an_offered_array_may_change_afterwards() -> None:
    shadow, reference, _, _ = a_shadow()
    seen: list[float] = []
    mine = ITEM.copy()

    def look(inputs: list[NDArray[Any]], outputs: list[NDArray[Any]]) -> Agreement:
        seen.append(float(inputs[0][0, 0]))
        return GOOD

    reference.compare = look  # type: ignore[method-assign]
    shadow.offer([mine], [ITEM])
    mine[:] = -1
    shadow.start()
    wait_until(lambda: bool(seen), "it is compared")
    assert seen == [1.0]


def test_the_alarm_is_raised_once_and_is_cleared_half_way_back_to_agreement() -> None:
    shadow, reference, said, _ = a_shadow(alarm=0.9)

    def compared(answer: Agreement, count: int) -> None:
        reference.answer = answer
        for _ in range(count):
            shadow.step([ITEM], [ITEM])

    compared(BAD, ALARM_MIN - 1)
    assert said == [], "too few to say"
    compared(BAD, 1)
    assert said == ["shadow_alarm"]
    compared(GOOD, RECENT_MAX - 4)
    assert shadow.figures()["shadow_agreement"] == pytest.approx(0.92)
    assert said == ["shadow_alarm"], "no longer below, and not yet over"
    compared(GOOD, 2)
    assert said == ["shadow_alarm", "shadow_recovered"]
    compared(BAD, 3)
    assert len(said) == 2
    compared(BAD, 3)
    assert said[2:] == ["shadow_alarm"]


def test_drift_distinguishes_a_model_that_gets_worse_from_one_that_was_always_bad() -> None:
    always, reference, _, _ = a_shadow()
    for i in range(4 * RECENT_MAX):
        reference.answer = GOOD if i % 2 else BAD
        always.step([ITEM], [ITEM])
    assert always.figures()["shadow_drift"] == pytest.approx(0.0)
    worse, reference, _, _ = a_shadow()
    for i in range(4 * RECENT_MAX):
        reference.answer = GOOD if i < 3 * RECENT_MAX else BAD
        worse.step([ITEM], [ITEM])
    assert worse.figures()["shadow_drift"] == pytest.approx(0.75)


def test_a_reference_that_fails_is_paused_and_opened_again() -> None:
    shadow, reference, _, now = a_shadow()
    reference.fails = 1
    shadow.step([ITEM], [ITEM])
    assert (reference.opened, reference.closed, shadow.failed) == (1, 1, 1)
    assert shadow.status().fault == "gone"
    shadow.step([ITEM], [ITEM])
    assert (reference.asked, shadow.dropped) == (1, 1)
    now[0] += RESTART_S
    shadow.step([ITEM], [ITEM])
    assert (reference.opened, shadow.sampled, shadow.fault) == (2, 1, None)


# --- the real process -------------------------------------------------------------------------


MODELS = ("copies", "sums", "alone", "crashes")


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with a_device(
        "[serving]\nwindow_s = 1.0\n" + "".join(f"[models.{name}]\nshadow = 1.0\n" for name in MODELS)
    ) as device:
        yield device


def test_live_answers_are_compared_in_a_process_of_idle_priority(device: Device) -> None:
    device.put(model="copies", reference={"op": "copy"})
    with device.client() as client:

        def compared() -> bool:
            client.infer("copies", ITEM, cache=False)
            return int(device.serving("copies")["shadow"]["total"]) >= 3

        wait_until(compared, "answers are compared")
    assert device.serving("copies")["shadow"]["agreement"] == 1.0
    worker = device.serving("copies")["pid"]
    children = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _parent(int(entry)) == worker]
    assert len(children) == 1
    assert os.getpriority(os.PRIO_PROCESS, children[0]) == 19
    assert os.sched_getscheduler(children[0]) == os.SCHED_IDLE
    device.put(model="copies", release=2)
    wait_until(lambda: not os.path.exists(f"/proc/{children[0]}"), "it ends with its worker")


def test_a_model_that_answers_otherwise_than_its_reference_raises_the_alarm(device: Device) -> None:
    device.put(model="sums", op="sum", reference={"op": "copy"})
    with device.client() as client:

        def alarmed() -> bool:
            for value in range(1, 21):
                client.infer("sums", ITEM * value, cache=False)
            return bool(device.serving("sums")["shadow"]["alarm"])

        wait_until(alarmed, "the alarm is raised")
    assert device.serving("sums")["shadow"]["agreement"] < 0.9
    wait_until(lambda: "shadow_alarm" in device.log(), "the log has it")


def test_without_a_reference_the_model_is_served_and_the_log_says_why(device: Device) -> None:
    device.put(model="alone")
    with device.client() as client:
        assert client.infer("alone", ITEM)["y"].tolist() == ITEM.tolist()
    assert device.serving("alone")["shadow"] is None
    wait_until(lambda: "--with-reference" in device.log(), "the log says why")


def test_no_live_answer_is_lost_if_the_reference_crashes(device: Device) -> None:
    fault = {"op": "copy", "runs": [{"fault": "segfault", "after": 3}]}
    device.put(model="crashes", reference=fault, reference_engine="fault")
    with device.client() as client:

        def failed() -> bool:
            assert client.infer("crashes", ITEM, cache=False)["y"].tolist() == ITEM.tolist()
            return int(device.serving("crashes")["shadow"]["failed"]) > 0

        wait_until(failed, "the reference has crashed")
        assert client.infer("crashes", ITEM, cache=False)["y"].tolist() == ITEM.tolist()
    assert device.serving("crashes")["crashes"] == 0


def test_a_reference_of_another_bundle_is_refused() -> None:
    with a_device(started=False) as device:
        load_message = LoadMessage("echo", "/nowhere", "0" * 64, str(device.state.root), "boot")
        with pytest.raises((BundleError, EngineFailed, Unavailable)):
            ReferenceProcess(load_message)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0
