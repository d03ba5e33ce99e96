"""The error tree: one root, a stable code on each class, grouped by who must act.

A message gives the value, the limit and the next step. `code` is part of the public contract (scripts and other languages
match on it), `exit_code` is the command line's exit status, and `wire_code` is the number on the local socket (see
docs/protocol.md).
"""

from __future__ import annotations


class EdgeRTError(Exception):
    """Root of every error that EdgeRT raises on purpose.

    With `retryable`, the same call may succeed later; `retry_after_s` is the server's advice in seconds, or None.
    """

    code = "internal"
    exit_code = 1
    wire_code = 1
    retryable = False

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


# --- the caller's request must change -------------------------------------------------------


class RequestError(EdgeRTError):
    """The request itself is wrong; sending it again will not help."""

    code = "request.invalid"
    exit_code = 8
    wire_code = 10


class ProtocolError(RequestError):
    """Bytes on the local socket are not the protocol of docs/protocol.md."""

    code = "request.protocol"
    wire_code = 11


class ModelNotFound(RequestError):
    """No model of that name is live on the device."""

    code = "request.model_not_found"
    wire_code = 12


class DeadlineExceeded(RequestError):
    """The request's deadline passed before the engine could start on it, or before an answer came."""

    code = "request.deadline_exceeded"
    wire_code = 13


class SessionLost(RequestError):
    """What the daemon kept of a session is gone, so that no request can continue it: begin a new one."""

    code = "request.session_lost"
    wire_code = 15


class NotAllowed(RequestError):
    """The device's configuration does not let this user connect."""

    code = "request.not_allowed"
    wire_code = 14


# --- the caller may try again ---------------------------------------------------------------


class Unavailable(EdgeRTError):
    """The daemon cannot answer now; the same request may succeed later."""

    code = "unavailable"
    exit_code = 8
    wire_code = 20
    retryable = True


class Overloaded(Unavailable):
    """The model's bounded queue is full; retry after `retry_after_s`."""

    code = "unavailable.overloaded"
    wire_code = 21


class WorkerLost(Unavailable):
    """The worker process ended while this request was in it; it may be sent again."""

    code = "unavailable.worker_lost"
    wire_code = 22


class DaemonUnreachable(Unavailable):
    """Nothing answers on the daemon's socket."""

    code = "unavailable.daemon"
    wire_code = 23


class Moved(Unavailable):
    """Another worker serves the model now; this request reached no engine."""

    code = "unavailable.moved"


class ShuttingDown(Unavailable):
    """The daemon is stopping and accepts no new request."""

    code = "unavailable.shutting_down"
    wire_code = 24


# --- the bundle must change -----------------------------------------------------------------


class BundleError(EdgeRTError):
    """A bundle cannot be accepted; the live version stays live."""

    code = "bundle.invalid"
    exit_code = 5
    wire_code = 30


class BundleCorrupt(BundleError):
    """Bytes differ from the signed manifest."""

    code = "bundle.corrupt"


class SignatureInvalid(BundleError):
    """The signature does not match, or this device does not trust its key."""

    code = "bundle.signature_invalid"


class ReleaseTooOld(BundleError):
    """The release number is below the highest that this device has marked good."""

    code = "bundle.release_too_old"


class NotCompatible(BundleError):
    """The bundle holds nothing for this device's profile or processor."""

    code = "bundle.not_compatible"


class BundleExpired(BundleError):
    """The bundle's signed expiry is past."""

    code = "bundle.expired"


# --- the channel must change ----------------------------------------------------------------


class ChannelInvalid(EdgeRTError):
    """The statement of a channel, or what a registry gives for it, cannot be used; nothing is installed."""

    code = "channel.invalid"
    exit_code = 5


class ChannelTooOld(ChannelInvalid):
    """A registry gives an older statement than the device has seen."""

    code = "channel.too_old"


class ChannelExpired(ChannelInvalid):
    """The statement's signed expiry is past, and the registry has no newer one."""

    code = "channel.expired"


class ChannelMismatch(ChannelInvalid):
    """A registry gives other content than the statement names."""

    code = "channel.mismatch"


# --- the device must change -----------------------------------------------------------------


class DeviceError(EdgeRTError):
    """The device cannot do this in its present state."""

    code = "device.error"
    exit_code = 7
    wire_code = 40


class EngineMissing(DeviceError):
    """The engine's SDK is not installed; the message names what to install."""

    code = "device.engine_missing"
    wire_code = 41


class EngineFailed(DeviceError):
    """The engine cannot load or run the artifact."""

    code = "device.engine_failed"
    wire_code = 42


class TransitionRefused(DeviceError):
    """The slots' transition table has no such step from the present state."""

    code = "device.transition_refused"


class DaemonBusy(DeviceError):
    """The daemon runs and does not answer its control socket."""

    code = "device.daemon_busy"
    retryable = True


class SlotsBusy(DeviceError):
    """Another command holds the model's slots."""

    code = "device.slots_busy"
    retryable = True


class DeployUnderWay(DeviceError):
    """Another deployment changes the same model on the device; nothing was done."""

    code = "device.deploy_under_way"
    retryable = True


class FollowerBusy(DeviceError):
    """Another process follows the channel on this device at this moment."""

    code = "device.follower_busy"
    retryable = True


class NotBootstrapped(DeviceError):
    """The device has no edgertd, or edgertd has no configuration."""

    code = "device.not_bootstrapped"


class RuntimeBroken(DeviceError):
    """EdgeRT is installed on the device, but the Python of its environment does not start."""

    code = "device.runtime_broken"


class HealthCheckFailed(DeviceError):
    """The live version's answers differ from the bundle's golden outputs."""

    code = "device.health_check_failed"
    exit_code = 9


class StorageFailed(DeviceError):
    """The device's disk failed a write (full, read-only, broken); nothing became live."""

    code = "device.storage_failed"


class DeviceUnreachable(EdgeRTError):
    """The host cannot reach the device, or the connection broke."""

    code = "device.unreachable"
    exit_code = 6
    retryable = True


class LoginRefused(DeviceUnreachable):
    """The device, or a jump host before it, accepts none of the offered keys."""

    code = "device.login_refused"
    retryable = False


class HostKeyMismatch(EdgeRTError):
    """The device has another SSH host key than the pinned one; nothing was sent."""

    code = "device.host_key_mismatch"
    exit_code = 6


class RolledBack(EdgeRTError):
    """A deployment failed on the device, and the version before it is live again."""

    code = "deploy.rolled_back"
    exit_code = 9


class Interrupted(EdgeRTError):
    """The user stopped a command; the message tells the device's state."""

    code = "deploy.interrupted"
    exit_code = 130


# --- the registry, or the way to it, must change ---------------------------------------------


class RegistryError(EdgeRTError):
    """The registry's answer cannot be used."""

    code = "registry.invalid"
    exit_code = 6


class RegistryUnreachable(RegistryError):
    """The registry does not answer, is overloaded, or its answer broke off; the same request may succeed later."""

    code = "registry.unreachable"
    retryable = True


class RegistryLoginRefused(RegistryError):
    """The registry refuses the login, or wants one and there is none."""

    code = "registry.login_refused"


class NotInRegistry(RegistryError):
    """The registry does not hold what was asked for."""

    code = "registry.not_found"


class RegistryCorrupt(RegistryError):
    """Bytes from the registry are not those that their digest names, or are more than announced."""

    code = "registry.corrupt"


# --- the input of a host's command must change ----------------------------------------------


class InputError(EdgeRTError):
    """A file or an option given to a command cannot be used."""

    code = "input.invalid"
    exit_code = 4


class SourceInvalid(InputError):
    """The source model cannot be packed."""

    code = "input.source_invalid"


class CalibrationInvalid(InputError):
    """The calibration or hold-out samples do not fit the model."""

    code = "input.calibration_invalid"


class OperatorUnsupported(InputError):
    """A target does not support an operator of the model; the message names operator and node."""

    code = "input.operator_unsupported"
    exit_code = 10


class ConfigInvalid(InputError):
    """A profile, an inventory, a key or a configuration file is wrong or missing."""

    code = "input.config_invalid"


class AccuracyTooLow(EdgeRTError):
    """An artifact lost more accuracy than allowed."""

    code = "build.accuracy_too_low"
    exit_code = 3


class BuildFailed(EdgeRTError):
    """A builder's own tool failed on a model that passed all checks."""

    code = "build.failed"
    exit_code = 11


def by_wire_code(wire_code: int) -> type[EdgeRTError]:
    """Return the class of `wire_code`; the root class for an unknown number."""
    return _BY_WIRE_CODE.get(wire_code, EdgeRTError)


def _descendants(cls: type[EdgeRTError]) -> list[type[EdgeRTError]]:
    found: list[type[EdgeRTError]] = []
    for child in cls.__subclasses__():
        found += [child, *_descendants(child)]
    return found


# On the wire, a class that inherits its parent's wire_code becomes its parent.
_CLASSES: list[type[EdgeRTError]] = [EdgeRTError, *_descendants(EdgeRTError)]
_BY_WIRE_CODE = {cls.wire_code: cls for cls in _CLASSES if "wire_code" in vars(cls)}
