"""`edgert infer`: one question to a daemon on this machine."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from edgert import Client
from edgert.config import StateDir, default_socket, read_config
from edgert.errors import ConfigInvalid, InputError
from edgert_deploy.cli.fleet_options import emit, inventory_option, json_option
from edgert_deploy.inventory import find_inventory

INPUT_BYTES_MAX = 1024**3
SHOWN_VALUES_MAX = 64


@click.command()
@click.argument("model")
@click.option(
    "--input",
    "source",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="A .npy array, or an .npz with one array per input name.",
)
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    help="The daemon's socket [default: $EDGERT_SOCKET, else this machine's].",
)
@click.option("--on", "device_name", help="A local device of the inventory.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the outputs whole, as .npz.")
@inventory_option
@json_option
def infer(
    model: str,
    source: Path,
    socket: Path | None,
    device_name: str | None,
    out: Path | None,
    inventory_file: Path | None,
    as_json: bool,
) -> None:
    """Ask MODEL for an answer on a running daemon.

    \b
    Examples:
      edgert infer digits --input images.npy --on here
      edgert infer detector --input frame.npz --socket /run/edgert/edgert.sock --json
    """
    if socket is not None and device_name is not None:
        raise click.UsageError("give either --socket or --on")
    path = socket or (_socket_of(device_name, inventory_file) if device_name else default_socket())
    inputs = _read(source)
    with Client(path) as client:
        outputs = client.infer(model, inputs)
    if out is not None:
        with out.open("wb") as file:
            np.savez(file, **outputs)  # type: ignore[arg-type]  # NumPy's stub takes the names for its own option
    value = {name: {"shape": list(a.shape), "dtype": a.dtype.name, "values": a.tolist()} for name, a in outputs.items()}
    text = "\n".join(_line(name, array) for name, array in outputs.items())
    emit({"model": model, "outputs": value}, text, as_json)


def _socket_of(name: str, inventory_file: Path | None) -> Path:
    device = find_inventory(inventory_file).device(name)
    if device.transport != "local":
        raise ConfigInvalid(
            f"{name} is another machine: the socket is local there. Run edgert infer on it, or use --socket"
        )
    state = StateDir(Path(device.state))
    return state.socket(read_config(state))


def _read(source: Path) -> NDArray[Any] | dict[str, NDArray[Any]]:
    """The array, or the arrays by name. Never unpickles."""
    try:
        if source.stat().st_size > INPUT_BYTES_MAX:
            raise InputError(f"{source} has {source.stat().st_size} bytes; at most {INPUT_BYTES_MAX} are sent")
        loaded = np.load(source, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{source} cannot be read as .npy or .npz: {error}") from error


def _line(name: str, array: NDArray[Any]) -> str:
    shown = np.array2string(array, threshold=SHOWN_VALUES_MAX, precision=4, suppress_small=True)
    return f"{name}  {array.dtype.name} {list(array.shape)}\n{shown}"
