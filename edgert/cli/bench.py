"""`edgertd bench`."""

from __future__ import annotations

from pathlib import Path

import click

from edgert.checks.bench_answer import BenchResult
from edgert.cli.output import emit, json_option, progress
from edgert.cli.quantity import Duration
from edgert.cli.slot_commands import store_of
from edgert.config import read_config
from edgert.errors import TransitionRefused
from edgert.printable import counted
from edgert.state_dir import StateDir
from edgert.typed_json import to_json
from edgert.versions.claims import claiming
from edgert.versions.installed import load_live
from edgert.versions.slot_store import SlotStore

CLIENTS_MAX = 64


@click.command()
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--model",
    help="Measure the live version of this model: through the socket, or with FOLDER, directly in the engine.",
)
@click.option("--for", "for_s", type=Duration(0, 600), default="5s", show_default=True, help="Time to measure.")
@click.option(
    "--clients",
    type=click.IntRange(1, CLIENTS_MAX),
    default=4,
    show_default=True,
    help="Clients at the same time, for the throughput; only with --model and no FOLDER.",
)
@json_option
@click.pass_obj
def bench(state: StateDir, folder: Path | None, model: str | None, for_s: float, clients: int, as_json: bool) -> None:
    """Measure the artifacts in FOLDER directly in the engine, without the daemon.

    The daemon continues to serve, which slows the measurement. With --model and no FOLDER, the command sends golden
    inputs to the live version through the socket, like an app. The device refuses this measurement during a deployment
    of the model, or while trial limits of the model are watched. No deployment can start during the measurement.

    `edgert bench` and `edgert build --measure-on` send a folder of artifacts, run this command, and remove the folder.

    \b
    Examples:
      edgertd bench /tmp/candidates --json
      edgertd bench --model digits
    """
    from edgert.checks.bench import bench as measure
    from edgert.checks.bench import live_artifact, read_work
    from edgert.checks.bench_live import bench_live, serving_of

    if folder is None:
        if model is None:
            raise click.UsageError("give a FOLDER with artifacts, or --model NAME for the live version")
        store = store_of(state, model)
        with claiming(state, model, "a benchmark (edgertd bench)"):  # no trial starts during the measurement
            _refuse_watched(model, store)
            measured = bench_live(model, store, state, read_config(state), for_s, clients, progress)
    else:
        work = read_work(folder)
        if model is not None:
            version = load_live(store_of(state, model), read_config(state))
            loaded = serving_of(model, state).loaded
            work.append(live_artifact(version, loaded.artifact if loaded else version.artifacts[0].id))
        measured = measure(work, for_s, state.cache, progress)
    emit(to_json(measured), "\n".join(_line(result) for result in measured.results), as_json)


def _refuse_watched(model: str, store: SlotStore) -> None:
    """Raise TransitionRefused while trial limits are watched: a benchmark would change the figures."""
    slots = store.read()
    if slots.on_trial and slots.limits is not None and not slots.limits.passed:
        raise TransitionRefused(
            f"the limits of {model}'s trial are watched, and a benchmark's requests would be counted as requests of apps: "
            f"wait for the end of the trial (edgertd trial {model} --wait), then measure"
        )


def _line(result: BenchResult) -> str:
    if result.times is None:
        return f"{result.id:28} {result.error.message if result.error else 'not measured'}"
    percentiles = {"p50": result.times.p50_ms, "p95": result.times.p95_ms, "p99": result.times.p99_ms}
    times = "   ".join(f"{name} {value:10.4f} ms" for name, value in percentiles.items())
    return f"{result.id:28} {times}   {result.times.per_s:10.1f} /s   {counted(result.threads or 0, 'thread')}"
