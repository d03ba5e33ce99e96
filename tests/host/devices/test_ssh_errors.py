"""Each text of paramiko means a refused login, or a reason why the machine cannot be reached."""

from __future__ import annotations

import paramiko
import pytest
from paramiko.ssh_exception import IncompatiblePeer, NoValidConnectionsError

from edgert_deploy.devices.transports.ssh_errors import SecondFactorNeeded, reason, refusal

NO_SESSION = paramiko.SSHException("No existing session")
LOST = paramiko.AuthenticationException("Authentication failed: transport shut down or saw EOF")
LATE = paramiko.AuthenticationException("Authentication timeout.")


def late_greeting() -> Exception:
    error: Exception = paramiko.SSHException("Error reading SSH protocol banner")
    error.__context__ = TimeoutError()
    return error


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (paramiko.AuthenticationException("Authentication failed."), "failed. Copy your public key there"),
        (
            paramiko.SSHException("No authentication methods available"),
            "this host offers no SSH key. Copy your public key",
        ),
        (paramiko.PasswordRequiredException("the key is encrypted"), "ssh-add"),
        (paramiko.BadAuthenticationType("", ["password"]), "no keys, only: password. EdgeRT logs in with keys only"),
        (paramiko.BadAuthenticationType("", ["publickey"]), "Copy your public key"),
        (SecondFactorNeeded("a code is needed"), "AuthenticationMethods publickey"),
        (NO_SESSION, "after several keys. Offer one key"),
    ],
)
def test_the_error_of_a_refused_login_names_the_next_step(error: Exception, advice: str) -> None:
    refused = refusal(error, encrypted=True)
    assert refused is not None
    assert advice in f"{refused.reason}. {refused.next_step}"
    assert refused.needs_key == ("Copy your" in advice)


def test_an_error_of_paramiko_about_another_kind_of_key_counts_as_a_refused_login() -> None:
    error = paramiko.SSHException("encountered RSA key, expected OPENSSH key")
    refused = refusal(error, encrypted=True, connected=True)
    assert refused is not None
    assert (refused.reason, refused.needs_key) == ("Authentication failed", True)
    assert refusal(error, encrypted=True, connected=False) is None, "such an error may also be of a damaged packet"


@pytest.mark.parametrize("error", [LOST, LATE, EOFError(), ConnectionRefusedError(111, "Connection refused")])
def test_a_lost_link_is_not_taken_for_a_refused_login(error: Exception) -> None:
    assert refusal(error, encrypted=True) is None


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (LOST, "ended during the login"),
        (EOFError(), "may have expired"),
        (LATE, "did not answer the login in time"),
        (NO_SESSION, "sent no greeting in time"),
        (late_greeting(), "sent no greeting in time"),
        (paramiko.SSHException("Error reading SSH protocol banner"), "does not greet as SSH does"),
        (IncompatiblePeer("no acceptable kex algorithm"), "no acceptable kex algorithm. Its SSH server is old"),
        (
            ConnectionRefusedError(111, "Connection refused"),
            "Connection refused. It is on, but nothing listens there: check that sshd runs",
        ),
        (NoValidConnectionsError({("10.0.0.7", 22): OSError(113, "No route to host")}), "No route to host. Check"),
        (TimeoutError(), "TimeoutError. Check that it is on"),
    ],
)
def test_the_error_about_an_unreachable_machine_has_a_reason(error: Exception, text: str) -> None:
    assert refusal(error, encrypted=False) is None
    assert text in reason(error)
