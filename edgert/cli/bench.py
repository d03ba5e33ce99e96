"""`edgertd bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgert.cli.output import emit, progress
from edgert.config import StateDir


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seconds", type=click.FloatRange(0, 600), default=5.0, show_default=True, help="How long to measure.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_obj
def bench(state: StateDir, folder: Path, seconds: float, as_json: bool) -> None:
    """Measure the artifacts in FOLDER, engine alone; what serves goes on serving, and slows them down.

    `edgert build --measure-on DEVICE` sends such a folder, runs this, and removes it again.

    \b
    Example:
      edgertd bench /tmp/candidates --json
    """
    from edgert.serving.bench import bench as measure
    from edgert.serving.bench import read_work

    measured = measure(read_work(folder), seconds, state.cache, progress)
    emit(measured, "\n".join(_line(one) for one in measured["results"]), as_json)


def _line(one: dict[str, Any]) -> str:
    if "error" in one:
        return f"{one['id']:28} {one['error']['message']}"
    return f"{one['id']:28} {one['p50_ms']:10.4f} ms   p90 {one['p90_ms']:10.4f} ms   {one['threads']} threads"
