from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from edgert.errors import ConfigInvalid
from edgert.registry.login import Credentials, read_credentials

HOST = "registry.example.org"


def write(folder: Path, value: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(value))
    return file


@pytest.mark.parametrize("name", [HOST, f"https://{HOST}"])
def test_a_login_file_has_the_form_that_docker_writes(tmp_path: Path, name: str) -> None:
    file = write(tmp_path, {"auths": {name: {"auth": "cGk6c2U6Y3JldA=="}}})
    assert read_credentials(file, HOST) == Credentials("pi", "se:cret")
    assert read_credentials(file, "other.example.org") is None


def test_without_a_file_there_is_no_login() -> None:
    assert read_credentials(None, HOST) is None


@pytest.mark.parametrize("value", [[], {"auths": []}, {"auths": {HOST: "x"}}, {"auths": {HOST: {"auth": "?"}}}])
def test_a_file_of_another_form_is_an_error(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigInvalid, match="not a login file"):
        read_credentials(write(tmp_path, value), HOST)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="cannot read"):
        read_credentials(tmp_path / "missing.json", HOST)


def test_a_named_pipe_as_the_login_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigInvalid, match="use a regular file"):
        read_credentials(tmp_path / "pipe", HOST)


@pytest.mark.parametrize("key", ["credHelpers", "credsStore"])
def test_a_credential_helper_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    helper = tmp_path / "docker-credential-safe"
    helper.write_text('#!/bin/sh\nread host\necho "{\\"Username\\": \\"$1\\", \\"Secret\\": \\"$host\\"}"\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    file = write(tmp_path, {key: {HOST: "safe"} if key == "credHelpers" else "safe"})
    assert read_credentials(file, HOST) == Credentials("get", HOST)


@pytest.mark.parametrize("helper", ["missing-one", "../evil"])
def test_the_error_names_a_credential_helper_that_cannot_run(tmp_path: Path, helper: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"credential"):
        read_credentials(write(tmp_path, {"credsStore": helper}), HOST)


def test_an_identity_token_is_refused_with_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`az acr login` writes such a file; the user and the password in it are not a login."""
    file = write(tmp_path, {"auths": {HOST: {"auth": "MDAwMDo=", "identitytoken": "eyJ"}}})
    with pytest.raises(ConfigInvalid, match=f"{file} has an identity token .*docker login --username USER {HOST}"):
        read_credentials(file, HOST)
    (tmp_path / "docker-credential-safe").write_text('#!/bin/sh\necho \'{"Username": "<token>", "Secret": "eyJ"}\'\n')
    (tmp_path / "docker-credential-safe").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ConfigInvalid, match="docker-credential-safe has an identity token"):
        read_credentials(write(tmp_path, {"credsStore": "safe"}), HOST)
