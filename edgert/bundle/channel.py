"""A channel: the signed statement that names the release of each model for its devices.

A host writes statements and puts the newest into a registry; devices request it. The registry is not trusted: a
statement is a DSSE envelope with the signature of a trusted key. Its counter only rises, and it expires. One statement
contains all models of the channel, so that no registry can mix entries of two statements.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, field

from edgert.bundle.document import Document
from edgert.bundle.envelope import CHANNEL_PAYLOAD_TYPE, parse_envelope, sign
from edgert.bundle.expiry import expiry_time, time_text
from edgert.bundle.signing import PublicKey, SigningKey
from edgert.durations import TRIAL_S_MAX
from edgert.errors import BundleCorrupt, ChannelExpired, ChannelInvalid, ChannelTooOld, SignatureInvalid
from edgert.names import CHANNEL_NAME, CHANNEL_NAME_RULE, NAME, NAME_RULE, RUNTIME
from edgert.typed_json import Closed

STATEMENT_BYTES_MAX = 256 * 1024  # the envelope's limit
ENTRIES_MAX = 256
SELECTED_MAX = 64  # the most sites, profiles or tags of an entry, and the most keys that a statement revokes
LIMITS_MAX = 16
TEXT_LENGTH_MAX = 200
KEY_ID = re.compile(r"[0-9a-f]{16}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COUNTER_MAX = 2**53


@dataclass(frozen=True)
class ChannelDevice:
    """The properties by which an entry of a statement selects a device."""

    site: str
    device: str
    profile: str
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry(Closed):
    """A release of a model for the devices that the entry selects.

    If a model has several entries, a device uses the first entry that selects it.

    A device that rolled a release back tries the release again if `limits`, `watch_s` or `attempt` change. The entry of
    a runtime has no limits: a new runtime has `watch_s` seconds to serve every model with the right answers.

    Attributes:
        model: The name of the model, or `edgert.runtime`.
        envelope: The SHA-256 of the bundle's envelope, which is its name in the registry.
        manifest: The SHA-256 of the OCI manifest, which is its name in the registry.
        share: The share of all devices that the entry selects, from 0 to 1.
        sites: The sites of the selected devices; empty for all sites.
        profiles: The profiles of the selected devices; empty for all profiles.
        tags: The tags of the selected devices; empty for all devices. `rack` also selects the tag `rack=3`.
        halted: Whether the release is halted, so that no device starts a trial of it.
        attempt: A number that the host raises to let devices try the release again.
    """

    model: str
    release: int
    digest: str
    envelope: str
    manifest: str
    share: float = 1.0
    sites: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    limits: dict[str, float] = field(default_factory=dict)
    watch_s: float = 60.0
    halted: bool = False
    attempt: int = 1

    def __post_init__(self) -> None:
        _check_entry(self)

    def selects(self, device: ChannelDevice) -> bool:
        keys = {tag.partition("=")[0] for tag in device.tags}
        return (
            (not self.sites or device.site in self.sites)
            and (not self.profiles or device.profile in self.profiles)
            and (not self.tags or not keys.union(device.tags).isdisjoint(self.tags))
            and position(device, self.model, self.release) < self.share
        )


@dataclass(frozen=True)
class Statement(Document, Closed):
    """The releases that a channel offers its devices. Times are UTC, as 2027-02-19T08:00:00Z.

    Attributes:
        counter: A number that only rises: max(last + 1, seconds since 1970). So the counter rises even in a new
            registry, which lacks the last counter.
        not_before: The time from which the statement applies; "" if it applies from `issued` on.
        revoked: The ids of keys that devices no longer trust. The key that signs the statement cannot be one of them.
    """

    WHAT, FAULT = "the channel", ChannelInvalid

    channel: str
    counter: int
    issued: str
    expires: str
    entries: tuple[Entry, ...]
    not_before: str = ""
    revoked: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_statement(self)

    @property
    def models(self) -> list[str]:
        """The models of the channel, in the order of its entries."""
        return list(dict.fromkeys(entry.model for entry in self.entries))

    def entry_for(self, model: str, device: ChannelDevice) -> Entry | None:
        """Return the first entry of `model` that selects `device`; None if there is none."""
        return next((e for e in self.entries if e.model == model and e.selects(device)), None)

    def expired(self, now_s: float) -> bool:
        """Return whether the statement has expired at `now_s`, in seconds since 1970."""
        return now_s >= expiry_time(self.expires)


def sign_statement(statement: Statement, key: SigningKey) -> bytes:
    """Return the envelope of `statement`. Raises ChannelInvalid if it is too large or revokes its own key."""
    if key.public.key_id in statement.revoked:
        raise ChannelInvalid(f"key {key.public.key_id} cannot revoke itself: sign with another trusted key")
    envelope = sign(statement.to_bytes(), key, CHANNEL_PAYLOAD_TYPE)
    if len(envelope) > STATEMENT_BYTES_MAX:
        raise ChannelInvalid(
            f"the channel takes {len(envelope)} bytes; at most {STATEMENT_BYTES_MAX} are allowed: remove entries"
        )
    return envelope


def read_statement(data: bytes, channel: str, trusted: tuple[PublicKey, ...]) -> Statement:
    """Return the statement in an envelope that one of `trusted` signed for `channel`.

    Raises SignatureInvalid. Raises ChannelInvalid if the bytes are not a statement of `channel`. Call `check_next`
    before you follow the statement.
    """
    if len(data) > STATEMENT_BYTES_MAX:
        raise ChannelInvalid(
            f"the registry's content for channel {channel} exceeds {STATEMENT_BYTES_MAX} bytes, so it is not a statement: publish again"
        )
    try:
        envelope = parse_envelope(data, CHANNEL_PAYLOAD_TYPE)
    except BundleCorrupt as error:
        raise ChannelInvalid(error.message) from error
    signed_by = envelope.verify(trusted)
    statement = Statement.from_bytes(envelope.payload)
    if signed_by.key_id in statement.revoked:
        raise SignatureInvalid(f"the channel revokes key {signed_by.key_id}, which signed it: sign with another key")
    if statement.channel != channel:
        raise ChannelInvalid(
            f"the registry sent the statement of channel {statement.channel} for channel {channel}: publish again"
        )
    return statement


def check_next(statement: Statement, counter: int, now_s: float) -> None:
    """Raise unless `statement` may follow a statement with `counter` (0: none yet) at the time `now_s`.

    The clock of a device may be late, but the signed time of issue has certainly passed. Raises ChannelTooOld if the
    statement's counter is lower, ChannelExpired if the statement has expired, and ChannelInvalid if `not_before` is in
    the future.
    """
    now_s = max(now_s, expiry_time(statement.issued))
    name = f"channel {statement.channel}"
    if statement.counter < counter:
        raise ChannelTooOld(
            f"{name} has counter {statement.counter}, and {counter} was seen before, so the registry sent an older "
            f"statement. If the registry was restored from a backup, sign again: edgert channel renew {statement.channel}"
        )
    if statement.expired(now_s):
        raise ChannelExpired(
            f"{name} expired at {statement.expires}; the time is {time_text(now_s)}. Sign it again: "
            f"edgert channel renew {statement.channel}"
        )
    if statement.not_before and now_s < expiry_time(statement.not_before):
        raise ChannelInvalid(
            f"{name} starts at {statement.not_before}; the time is {time_text(now_s)}. Wait until then, or set this "
            "machine's clock if the clock is wrong"
        )


def position(device: ChannelDevice, model: str, release: int) -> float:
    """Return the position of a device among all devices for a release, from 0 to below 1.

    The position is fixed, so a higher share only adds devices.
    """
    text = f"{device.site}/{device.device}\n{model}\n{release}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def _check_statement(statement: Statement) -> None:
    if not CHANNEL_NAME.fullmatch(statement.channel):
        raise ChannelInvalid(f"channel name {statement.channel[:80]!r}: {CHANNEL_NAME_RULE}")
    if not 1 <= statement.counter < _COUNTER_MAX:
        raise ChannelInvalid(f"counter {statement.counter}: give a whole number from 1 up")
    if len(statement.entries) > ENTRIES_MAX:
        raise ChannelInvalid(f"the channel has {len(statement.entries)} entries; at most {ENTRIES_MAX} are allowed")
    if len(statement.revoked) > SELECTED_MAX or not all(map(KEY_ID.fullmatch, statement.revoked)):
        raise ChannelInvalid(f"revoked keys must be at most {SELECTED_MAX} key ids (edgert keys list)")
    begins = statement.not_before or statement.issued
    try:
        ordered = expiry_time(statement.issued) <= expiry_time(begins) < expiry_time(statement.expires)
    except ValueError as error:
        raise ChannelInvalid(f"a time cannot be read ({error}): give it like 2027-02-19T08:00:00Z") from error
    if not ordered:
        raise ChannelInvalid(
            f"the channel is issued at {statement.issued}, starts at {begins} and expires at {statement.expires}: "
            "give times in this order"
        )


def _check_entry(entry: Entry) -> None:
    if entry.model != RUNTIME and not NAME.fullmatch(entry.model):
        raise ChannelInvalid(f"model name {entry.model[:80]!r}: {NAME_RULE}")
    name = f"release {entry.release} of {entry.model}"
    if not (1 <= entry.release < _COUNTER_MAX and 1 <= entry.attempt < _COUNTER_MAX):
        raise ChannelInvalid(f"{name}, attempt {entry.attempt}: give whole numbers from 1 up")
    if not all(map(_SHA256.fullmatch, (entry.digest, entry.envelope, entry.manifest))):
        raise ChannelInvalid(
            f"{name} needs the SHA-256 of its bundle, envelope and OCI manifest, each in 64 hex digits"
        )
    if not 0 <= entry.share <= 1:
        raise ChannelInvalid(f"{name} has the share {entry.share:g}: give 0 to 1")
    for selected in (entry.sites, entry.profiles, entry.tags):
        if len(selected) > SELECTED_MAX or any(not 0 < len(text) <= TEXT_LENGTH_MAX for text in selected):
            raise ChannelInvalid(
                f"{name} selects by too many or too long names: give at most {SELECTED_MAX}, of 1 to {TEXT_LENGTH_MAX} characters"
            )
    if len(entry.limits) > LIMITS_MAX or not all(math.isfinite(v) and v >= 0 for v in entry.limits.values()):
        raise ChannelInvalid(
            f"{name} has trial limits that cannot be used: give at most {LIMITS_MAX}, each a number from 0 up"
        )
    if entry.model == RUNTIME and entry.limits:
        raise ChannelInvalid(
            f"{name} has trial limits, but the trial of a runtime checks only the models' golden samples: remove the limits"
        )
    if not 0 < entry.watch_s <= TRIAL_S_MAX:
        raise ChannelInvalid(f"{name} is watched for {entry.watch_s:g} s; give more than 0, at most {TRIAL_S_MAX:g} s")
