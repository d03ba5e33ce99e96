"""A Unix listener has its mode from the start, replaces a dead socket, and refuses everything else."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from edgert.errors import ConfigInvalid
from edgert.protocol.listening import SO_PASSRIGHTS, listening


def test_a_listening_socket_accepts_clients_and_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.sock"
    with listening(path, 0o640) as listener, socket.socket(socket.AF_UNIX) as client:
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        client.connect(str(path))
        listener.accept()[0].close()
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert not path.exists()


def test_a_client_can_send_no_descriptors_where_the_kernel_refuses_them(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with listening(path, 0o600) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        accepted, _ = listener.accept()
        with accepted:
            try:
                accepted.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS)
            except OSError:
                socket.send_fds(client, [b"x"], [client.fileno()])
            else:
                with pytest.raises(PermissionError):
                    socket.send_fds(client, [b"x"], [client.fileno()])
            socket.send_fds(accepted, [b"x"], [client.fileno()])  # shared memory is sent in this way


def test_the_socket_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listening(path, 0o600), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_listening_is_refused_on_a_socket_in_use_and_on_a_file_and_for_an_unknown_group(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with listening(path, 0o600), pytest.raises(ConfigInvalid, match="another process listens"), listening(path, 0o600):
        pass
    path.write_text("x")
    with pytest.raises(ConfigInvalid, match="is not a socket"), listening(path, 0o600):
        pass
    with (
        pytest.raises(ConfigInvalid, match="no group 'nobody-has-this'"),
        listening(tmp_path / "b", 0o6, "nobody-has-this"),
    ):
        pass


def test_a_file_that_replaced_the_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with listening(path, 0o600):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"
