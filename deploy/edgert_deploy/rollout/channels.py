"""Channels in a registry: a host reads the statement of a channel, then signs and puts the next one.

A registry has no operation "replace if unchanged". So a writer reads the channel again right before and right after its
write. If two hosts write within the same few milliseconds, one of their statements replaces the other. The writer of
the replaced statement then gets ChannelChanged.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgert.bundle.bundle_file import ENVELOPE_BYTES_MAX
from edgert.bundle.channel import Entry, Statement, read_statement, sign_statement
from edgert.bundle.envelope import parse_envelope
from edgert.bundle.expiry import expiry_time, time_text
from edgert.bundle.manifest import Manifest
from edgert.bundle.signing import PublicKey, SigningKey
from edgert.durable import locked, replace_file, storing
from edgert.errors import ChannelTooOld, ConfigInvalid, EdgeRTError, NotInRegistry, SignatureInvalid, StorageFailed
from edgert.registry.address import Repository
from edgert.registry.artifacts import EMPTY, channel_manifest, channel_tag, read_channel
from edgert.registry.client import Blob, Registry
from edgert_deploy.rollout.channel_entries import Entries, newest_of
from edgert_deploy.rollout.plan import lower_score
from edgert_deploy.rollout.publish import put_small

EXPIRES_S = 30 * 86_400.0
CLOCK_S_MAX = 86_400.0  # the largest difference between this host's clock and the registry's
SEEN_BYTES_MAX = 1024**2


class ChannelChanged(EdgeRTError, code="channel.changed", exit_code=6, retryable=True):
    """Another host changed the channel at the same time."""


class SeenCounters:
    """The highest counter that this user has seen of each channel.

    A statement with a lower counter is refused. If the file is missing, the user has seen no channel yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def counter(self, repository: Repository, channel: str) -> int:
        return self._read().get(f"{repository} {channel}", 0)

    def record(self, repository: Repository, channel: str, counter: int) -> None:
        """Record a counter that the user has seen. Raises StorageFailed."""
        if self.counter(repository, channel) >= counter:
            return
        with storing(f"cannot write {self._path}"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self._path.with_name(f".{self._path.name}.lock")):  # another command may write its own channel
                current = self._read()
                if current.get(f"{repository} {channel}", 0) < counter:
                    text = json.dumps(current | {f"{repository} {channel}": counter}, indent=1, sort_keys=True)
                    replace_file(self._path, text.encode(), shared=True)

    def _read(self) -> dict[str, int]:
        try:
            with self._path.open("rb") as file:
                value = json.loads(file.read(SEEN_BYTES_MAX))
            return {str(name): int(counter) for name, counter in value.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise ConfigInvalid(
                f"{self._path} cannot be read: {error}. Check its rights; if it is damaged, remove it"
            ) from error


@dataclass(frozen=True)
class Channels:
    """The channels of one repository.

    Attributes:
        trusted: The keys whose signatures are accepted.
        seen: The counters that this user has seen.
        clock: Returns Unix time.
    """

    registry: Registry
    trusted: tuple[PublicKey, ...]
    seen: SeenCounters
    clock: Callable[[], float] = time.time

    def read(self, channel: str) -> Statement:
        """Return the verified statement of the channel.

        An expired statement is not refused, so that a host can sign the next statement. Raises NotInRegistry,
        SignatureInvalid, ChannelInvalid and RegistryError, and ChannelTooOld if this user saw a newer statement.
        """
        return self._read(channel)[1]

    def lower_scores(self, channel: str, entry: Entry) -> list[str]:
        """Return warnings if the release of `entry` scored less than the channel's newest release.

        A warning lists the profiles with the lower score. There is no warning if a release cannot be read, because
        `change` raises this error.
        """
        profiles: dict[str, list[str]] = {}
        with contextlib.suppress(EdgeRTError):
            before = newest_of(self.read(channel).entries, entry.model, channel)
            old, new = self._manifest(before), self._manifest(entry)
            for target in new.targets:
                accuracies = [
                    old.artifact(each.artifacts[0]).accuracy for each in old.targets if each.profile == target.profile
                ]
                other = f"release {before.release}, in channel {channel} before,"
                if text := lower_score(other, accuracies[0] if accuracies else None, new, target):
                    profiles.setdefault(text, []).append(target.profile)
        return [f"{text}: {', '.join(names)}" for text, names in profiles.items()]

    def _manifest(self, entry: Entry) -> Manifest:
        envelope = Blob(f"sha256:{entry.envelope}", ENVELOPE_BYTES_MAX)
        return Manifest.from_bytes(parse_envelope(self.registry.read(envelope, ENVELOPE_BYTES_MAX)).payload)

    def change(
        self,
        channel: str,
        edit: Callable[[Entries], Entries],
        key: SigningKey,
        *,
        lasts_s: float = EXPIRES_S,
        revoked: tuple[str, ...] = (),
        creates: bool = True,
    ) -> Statement:
        """Sign the channel's next statement, put it into the registry, and return it.

        Args:
            edit: Gets the old entries and returns the new entries.
            lasts_s: The time for which the statement is valid.
            revoked: The ids of the keys that devices must no longer trust.
            creates: Whether a missing channel is created. If False, it raises NotInRegistry.

        Raises ChannelChanged, the errors of `read`, and StorageFailed if the user's counters cannot be written. The
        channel may then be changed; the message tells this.
        """
        known, before = "", None
        try:
            known, before = self._read(channel)
        except NotInRegistry:
            if not creates:
                raise
            if counter := self.seen.counter(self.registry.repository, channel):
                raise ConfigInvalid(
                    f"{self.registry.repository} has no channel {channel} any more; this user saw it with counter "
                    f"{counter}. Restore the registry, or start a channel under another name"
                ) from None
        statement = self._next(channel, before, edit(before.entries if before else ()), lasts_s, revoked)
        envelope = sign_statement(statement, key)
        manifest = channel_manifest(envelope, channel, statement.counter, statement.expires)
        put_small(self.registry, EMPTY, envelope)
        self._check_unchanged(channel, known)
        digest = self.registry.put_manifest(channel_tag(channel), manifest)
        self._check_unchanged(channel, digest)
        try:
            self.seen.record(self.registry.repository, channel, statement.counter)
        except StorageFailed as error:
            raise error.with_message(
                f"channel {channel} is changed, but its counter {statement.counter} could not be noted: {error.message}. "
                f"Make this file writable, then run edgert channel show {channel}; do not repeat the change"
            ) from error
        return statement

    def _read(self, channel: str) -> tuple[str, Statement]:
        current = read_channel(self.registry, channel)
        assert current is not None  # None is only for a caller that knows the digest
        repository = self.registry.repository
        try:
            statement = read_statement(current[1], channel, self.trusted)
        except SignatureInvalid as error:
            known = ", ".join(key.key_id for key in self.trusted) or "none"
            raise SignatureInvalid(
                f"channel {channel} in {repository} has no signature of a key that this project knows ({known}): put "
                "the publisher's public key into the project's keys/, or find out who else may write to the registry"
            ) from error
        if statement.counter < (counter := self.seen.counter(repository, channel)):
            raise ChannelTooOld(
                f"{repository} has channel {channel} with counter {statement.counter}, but this user saw counter {counter}: the "
                "registry was restored from an older copy, or is hostile. Restore the newer statement, or use another channel name"
            )
        self.seen.record(repository, channel, statement.counter)
        return current[0], statement

    def _next(
        self, channel: str, before: Statement | None, entries: Entries, lasts_s: float, revoked: tuple[str, ...]
    ) -> Statement:
        now_s, there_s = self.clock(), self.registry.date_s
        if there_s is not None and abs(there_s - now_s) > CLOCK_S_MAX:
            raise ConfigInvalid(
                f"it is {time_text(now_s)} on this host, and {time_text(there_s)} at {self.registry.repository}: set the "
                "clock that is wrong. After a statement with a time too far ahead, devices refuse bundles as expired"
            )
        # If a statement is far ahead of both clocks, its host had a wrong clock. The next statement corrects the time.
        ahead_s = 0.0 if before is None else expiry_time(before.issued) - now_s
        if before is not None and ahead_s > 0 and (there_s is None or ahead_s <= CLOCK_S_MAX):
            raise ConfigInvalid(
                f"channel {channel} was signed at {before.issued}, but this host's clock says {time_text(now_s)}: set this clock"
            )
        return Statement(
            channel=channel,
            counter=max(before.counter + 1 if before else 1, int(now_s)),
            issued=time_text(now_s),
            expires=time_text(now_s + lasts_s),
            entries=entries,
            revoked=tuple(dict.fromkeys((*(before.revoked if before else ()), *revoked))),
        )

    def _check_unchanged(self, channel: str, digest: str) -> None:
        """Raise ChannelChanged if the channel's manifest has another digest; "" stands for no manifest."""
        try:
            manifest = self.registry.manifest(channel_tag(channel))
        except NotInRegistry:
            manifest = None
        if (manifest.digest if manifest else "") != digest:
            raise ChannelChanged(
                f"another host changed channel {channel} at the same time, and its statement is in effect: check it (edgert "
                f"channel show {channel}), then repeat this command"
            )
