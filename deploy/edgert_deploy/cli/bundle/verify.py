"""`edgert bundle verify`: check a bundle's signature, and every byte that the signature covers."""

from __future__ import annotations

from pathlib import Path

import click

from edgert.bundle.bundle_file import open_bundle
from edgert.cli.output import emit, json_option
from edgert_deploy.cli.shared.bootstrap_options import key_option, trusted_keys
from edgert_deploy.cli.shared.types import BundlePath
from edgert_deploy.common.keys import DEFAULT


@click.command()
@click.argument("bundle", type=BundlePath())
@key_option
@json_option
def verify(bundle: Path, key_names: tuple[str, ...], as_json: bool) -> None:
    """Check BUNDLE's signature and every byte. The exit code is 5 if one of them is wrong.

    \b
    Examples:
      edgert bundle verify digits.edgert
      edgert bundle verify digits.edgert --key keys/factory.pem --json
    """
    trusted = trusted_keys(key_names or (DEFAULT,))
    with open_bundle(bundle, trusted) as opened:
        opened.verify_files()
        assert opened.signed_by is not None  # open_bundle raises if no trusted key signed the bundle
        model, release, key_id = opened.manifest.model, opened.manifest.release, opened.signed_by.key_id
        value = {"model": model, "release": release, "digest": opened.digest, "key_id": key_id}
        emit(value, f"{bundle}: {model} release {release}, signed by {key_id}; every byte is as signed", as_json)
