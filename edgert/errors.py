"""The error tree: one root, a stable code on each class, grouped by who must act.

A message gives the value, the limit and the next step. `code` is part of the public contract, because scripts and other
languages match on it. `exit_code` is the exit status of the command. `wire_code` is the number on the local socket (see
docs/protocol.md).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

E = TypeVar("E", bound="EdgeRTError")

USAGE_CODE = "input.usage"  # the code of a wrong option or argument, which has no class


class EdgeRTError(Exception):
    """Root of every error that EdgeRT raises on purpose.

    With `retryable`, the same call may succeed later; `retry_after_s` is the server's advice in seconds, or None.
    A class states only its differences from its parent: `class ModelNotFound(RequestError, code="...", wire_code=12)`.
    """

    code = "internal"
    exit_code = 1
    wire_code = 1
    retryable = False

    def __init_subclass__(cls, **stated: str | int) -> None:
        super().__init_subclass__()
        for name, value in stated.items():
            assert name in ("code", "exit_code", "wire_code", "retryable"), name
            setattr(cls, name, value)

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    def with_message(self: E, text: str) -> E:
        """Return a copy with another message; class and other fields stay, the traceback and the cause do not."""
        error = copy.copy(self)
        error.args, error.message = (text,), text
        return error

    def as_json(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message}


# --- the caller's request must change -------------------------------------------------------


class RequestError(EdgeRTError, code="request.invalid", exit_code=8, wire_code=10):
    """The request itself is wrong; the same request will fail again."""


class ProtocolError(RequestError, code="request.protocol", wire_code=11):
    """Bytes on the local socket do not follow docs/protocol.md."""


class ModelNotFound(RequestError, code="request.model_not_found", wire_code=12):
    """No model of that name is live on the device."""


class DeadlineExceeded(RequestError, code="request.deadline_exceeded", wire_code=13):
    """The time-out passed before the engine started on the request, or before the answer arrived."""


class SessionLost(RequestError, code="request.session_lost", wire_code=15):
    """The daemon lost the memory of a session, so no request can continue it: start a new session."""


class NotAllowed(RequestError, code="request.not_allowed", wire_code=14):
    """The device's configuration does not let this user connect."""


# --- the caller may try again ---------------------------------------------------------------


class Unavailable(EdgeRTError, code="unavailable", exit_code=8, wire_code=20, retryable=True):
    """The daemon cannot answer now; the same request may succeed later."""


class Overloaded(Unavailable, code="unavailable.overloaded", wire_code=21):
    """The model's bounded queue is full; retry after `retry_after_s`."""


class WorkerLost(Unavailable, code="unavailable.worker_lost", wire_code=22):
    """The worker process ended before the answer; the caller may send the request again."""


class DaemonUnreachable(Unavailable, code="unavailable.daemon", wire_code=23):
    """Nothing answers on the daemon's socket."""


class DaemonEnded(DaemonUnreachable, code="unavailable.daemon_ended"):
    """The daemon ended before it answered a command; it may have started the command."""


class Moved(Unavailable, code="unavailable.moved"):
    """Another worker serves the model now; this request reached no engine."""


class ShuttingDown(Unavailable, code="unavailable.shutting_down", wire_code=24):
    """The daemon is stopping and accepts no new request."""


# --- the bundle must change -----------------------------------------------------------------


class BundleError(EdgeRTError, code="bundle.invalid", exit_code=5, wire_code=30):
    """A bundle cannot be accepted; the live version stays live."""


class BundleCorrupt(BundleError, code="bundle.corrupt"):
    """Bytes of a bundle differ from its signed manifest."""


class SignatureInvalid(BundleError, code="bundle.signature_invalid"):
    """The signature does not match, or this device does not trust its key."""


class ReleaseTooOld(BundleError, code="bundle.release_too_old"):
    """The release number is below the highest that this device has marked good."""


class NotCompatible(BundleError, code="bundle.not_compatible"):
    """The bundle contains no artifact for this device's profile or processor."""


class BundleExpired(BundleError, code="bundle.expired"):
    """The bundle's signed expiry is past."""


# --- the channel must change ----------------------------------------------------------------


class ChannelInvalid(EdgeRTError, code="channel.invalid", exit_code=5):
    """The statement of a channel, or the registry's content for it, cannot be used; nothing is installed."""


class ChannelTooOld(ChannelInvalid, code="channel.too_old"):
    """A registry sends an older statement than the device has seen."""


class ChannelExpired(ChannelInvalid, code="channel.expired"):
    """The statement's signed expiry is past, and the registry has no newer statement."""


class ChannelMismatch(ChannelInvalid, code="channel.mismatch"):
    """A registry sends other content than the statement names."""


# --- the device must change -----------------------------------------------------------------


class DeviceError(EdgeRTError, code="device.error", exit_code=7, wire_code=40):
    """The device cannot do this in its present state."""


class EngineMissing(DeviceError, code="device.engine_missing", wire_code=41):
    """The engine's SDK is not installed; the message names what to install."""


class EngineFailed(DeviceError, code="device.engine_failed", wire_code=42):
    """The engine cannot load or run the artifact."""


class TransitionRefused(DeviceError, code="device.transition_refused"):
    """The slots' transition table does not allow this step from the present state."""


class DaemonBusy(DeviceError, code="device.daemon_busy", retryable=True):
    """The daemon runs, but it does not answer on its control socket."""


class SlotsBusy(DeviceError, code="device.slots_busy", retryable=True):
    """Another command holds the model's slots."""


class DeployUnderWay(DeviceError, code="device.deploy_under_way", retryable=True):
    """Other work is in progress on the device, or this deployment's claim has expired.

    The other work is a deployment, a bootstrap, an uninstall or a trial.
    """


class FollowerBusy(DeviceError, code="device.follower_busy", retryable=True):
    """Another process follows the channel on this device at this moment."""


class NotBootstrapped(DeviceError, code="device.not_bootstrapped"):
    """The device has no edgertd, or edgertd has no configuration."""


class RuntimeBroken(DeviceError, code="device.runtime_broken"):
    """EdgeRT is installed on the device, but the Python of its environment does not start."""


class HealthCheckFailed(DeviceError, code="device.health_check_failed", exit_code=9):
    """The live version's answers differ from the bundle's golden outputs."""


class StorageFailed(DeviceError, code="device.storage_failed"):
    """The device's disk failed a write (full, read-only, broken); nothing became live."""


class DeviceUnreachable(EdgeRTError, code="device.unreachable", exit_code=6, retryable=True):
    """The host cannot reach the device, or the connection broke."""


class LoginRefused(DeviceUnreachable, code="device.login_refused", retryable=False):
    """The device, or a jump host before it, accepts none of the offered keys."""


class HostKeyMismatch(EdgeRTError, code="device.host_key_mismatch", exit_code=6):
    """The device's SSH host key differs from the pinned key; nothing was sent."""


class RolledBack(EdgeRTError, code="deploy.rolled_back", exit_code=9):
    """A deployment failed on the device, and the previous version is live again."""


class Interrupted(EdgeRTError, code="deploy.interrupted", exit_code=130):
    """The user stopped a command; the message tells the device's state."""


# --- the registry, or the way to it, must change ---------------------------------------------


class RegistryError(EdgeRTError, code="registry.invalid", exit_code=6):
    """The registry's answer cannot be used."""


class RegistryUnreachable(RegistryError, code="registry.unreachable", retryable=True):
    """The registry is unreachable or overloaded, or its answer was cut off; a retry may succeed."""


class RegistryLoginRefused(RegistryError, code="registry.login_refused"):
    """The registry refuses the login, or requires a login that is missing."""


class NotInRegistry(RegistryError, code="registry.not_found"):
    """The registry does not contain the requested content."""


class RegistryCorrupt(RegistryError, code="registry.corrupt"):
    """Bytes from the registry do not match their digest, or there are more bytes than announced."""


# --- the input of a host's command must change ----------------------------------------------


class InputError(EdgeRTError, code="input.invalid", exit_code=4):
    """A file or an option given to a command cannot be used."""


class SourceInvalid(InputError, code="input.source_invalid"):
    """The source model cannot be packed."""


class CalibrationInvalid(InputError, code="input.calibration_invalid"):
    """The calibration or hold-out samples do not fit the model."""


class OperatorUnsupported(InputError, code="input.operator_unsupported", exit_code=10):
    """A target does not support an operator of the model; the message names operator and node."""


class ConfigInvalid(InputError, code="input.config_invalid"):
    """A profile, an inventory, a key or a configuration file is wrong or missing."""


class AccuracyTooLow(EdgeRTError, code="build.accuracy_too_low", exit_code=3):
    """An artifact lost more accuracy than allowed."""


class BuildFailed(EdgeRTError, code="build.failed", exit_code=11):
    """A builder's own tool failed on a model that passed all checks."""


def by_wire_code(wire_code: int) -> type[EdgeRTError]:
    """Return the class of `wire_code`; the root class for an unknown number."""
    return _BY_WIRE_CODE.get(wire_code, EdgeRTError)


def by_code(code: str) -> type[EdgeRTError]:
    """Return the class that states `code`; the root class for an unknown code."""
    return next((cls for cls in _descendants(EdgeRTError) if vars(cls).get("code") == code), EdgeRTError)


@dataclass(frozen=True)
class ErrorText:
    """An error in JSON. The code may be of another version of edgert, and have no class in this version."""

    code: str
    message: str

    @classmethod
    def of(cls, error: EdgeRTError) -> ErrorText:
        return cls(error.code, error.message)

    @property
    def exit_code(self) -> int:
        return by_code(self.code).exit_code

    def as_error(self) -> EdgeRTError:
        return by_code(self.code)(self.message)


def exit_code_of(errors: Iterable[EdgeRTError | ErrorText | None]) -> int:
    """Return the exit code for several devices: 130 after a Ctrl-C, else the code of the first error."""
    codes = [error.exit_code for error in errors if error is not None]
    return Interrupted.exit_code if Interrupted.exit_code in codes else next(iter(codes), 0)


def _descendants(cls: type[EdgeRTError]) -> list[type[EdgeRTError]]:
    classes: list[type[EdgeRTError]] = []
    for child in cls.__subclasses__():
        classes += [child, *_descendants(child)]
    return classes


# On the wire, a class that inherits the wire_code of its parent becomes its parent.
_CLASSES: list[type[EdgeRTError]] = [EdgeRTError, *_descendants(EdgeRTError)]
_BY_WIRE_CODE = {cls.wire_code: cls for cls in _CLASSES if "wire_code" in vars(cls)}
