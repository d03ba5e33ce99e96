"""`edgertd have`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from edgert.bundle.delta import PATCH_BYTES_MAX, has_zstd
from edgert.cli.output import emit, json_option
from edgert.config import StateDir, read_config
from edgert.errors import ConfigInvalid
from edgert.names import MODEL_NAME
from edgert.versions.install import held_files

MEMORY_SHARE = 6  # of the free memory: a patch needs the old file, the window and buffers


@click.command(hidden=True)
@click.argument("model")
@json_option
@click.pass_obj
def have(state: StateDir, model: str, as_json: bool) -> None:
    """List the files of MODEL on this device, which a host need not send, and the deltas that it may send.

    `edgert deploy` runs this.

    \b
    Example:
      edgertd have digits --json
    """
    if not MODEL_NAME.fullmatch(model):
        raise ConfigInvalid(f"{model[:80]!r} is no model's name: a letter, then at most 62 of a-z 0-9 _ -")
    read_config(state)
    value = what_is_here(state, model)
    emit(value, "\n".join(f"{f['sha256']}  {f['path']}" for f in value["files"]) or "none", as_json)


def what_is_here(state: StateDir, model: str) -> dict[str, Any]:
    """Return the files in the model's slots, whether zstd can be read, and the largest patch that can be applied."""
    root = state.models / model
    files = [
        # The slot's own folder is no part of the name that a manifest gives.
        {"path": os.fspath(Path(*path.relative_to(root).parts[1:])), "sha256": sha256, "bytes": path.stat().st_size}
        for sha256, path in held_files(state, model).items()
    ]
    zstd = has_zstd()
    return {"model": model, "files": files, "zstd": zstd, "patch_bytes_max": _patch_bytes_max() if zstd else 0}


def _patch_bytes_max() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0
    return min(PATCH_BYTES_MAX, available // MEMORY_SHARE)
