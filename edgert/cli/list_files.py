"""`edgertd list-files`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from edgert.bundle.delta import PATCH_BYTES_MAX, has_zstd
from edgert.cli.output import emit, json_option
from edgert.config import read_config
from edgert.machine import mem_available_bytes
from edgert.names import check_model_name
from edgert.state_dir import StateDir
from edgert.versions.install import held_files

# The largest patch is 1/6 of the free memory, because a patch needs the old file, the window and buffers.
MEMORY_SHARE = 6


@click.command("list-files", hidden=True)
@click.argument("model")
@json_option
@click.pass_obj
def list_files(state: StateDir, model: str, as_json: bool) -> None:
    """List the files of MODEL on this device, which a host need not send, and the limits for a delta.

    `edgert deploy` runs this command.

    \b
    Example:
      edgertd list-files digits --json
    """
    check_model_name(model)
    read_config(state)
    value = files_here(state, model)
    emit(value, "\n".join(f"{f['sha256']}  {f['path']}" for f in value["files"]) or "none", as_json)


def files_here(state: StateDir, model: str) -> dict[str, Any]:
    """Return the files in the model's slots, whether this device can read zstd, and the largest patch."""
    root = state.models / model
    files = [
        # A name in a manifest is relative to the slot's folder.
        {"path": os.fspath(Path(*path.relative_to(root).parts[1:])), "sha256": sha256, "bytes": path.stat().st_size}
        for sha256, path in held_files(state, model).items()
    ]
    zstd = has_zstd()
    patch_bytes_max = min(PATCH_BYTES_MAX, (mem_available_bytes() or 0) // MEMORY_SHARE) if zstd else 0
    return {"model": model, "files": files, "zstd": zstd, "patch_bytes_max": patch_bytes_max}
