"""`edgert infer`: one question to a daemon, on this machine or on a device."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from pathlib import Path

import click

from edgert import Client
from edgert.cli.tensor_files import Arrays, as_text, read_inputs, write_outputs
from edgert.cli.tensor_files import as_json as described
from edgert.config import default_socket
from edgert.errors import EdgeRTError, InputError
from edgert_deploy.cli.fleet_options import emit, inventory_option, json_option
from edgert_deploy.devices.inventory import Device, find_inventory
from edgert_deploy.devices.remote import RemoteDaemon
from edgert_deploy.devices.transports import open_transport

ASK_S_MAX = 300.0
QUICK_S_MAX = 60.0


@click.command()
@click.argument("model")
@click.option(
    "--input",
    "source",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="A .npy array, an .npz with one array per input name, or a JPEG or PNG file.",
)
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    help="The daemon's socket [default: $EDGERT_SOCKET, else this machine's].",
)
@click.option("--on", "device_name", help="A device of the inventory: the file goes there and the answer comes back.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the outputs whole, as .npz; --json then leaves the values out.",
)
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

    Exits with 4 where the file cannot be used, 6 where the device cannot be reached, 8 where the request fails.

    \b
    Examples:
      edgert infer digits --input images.npy --on kitchen
      edgert infer classifier --input photo.jpg --on kitchen
      edgert infer detector --input frame.npz --socket /run/edgert/edgert.sock --json
    """
    if socket is not None and device_name is not None:
        raise click.UsageError("give either --socket or --on")
    inputs = read_inputs(source)  # also where it is sent: what cannot be read is said before anything is sent
    if device_name is not None:
        outputs = ask_device(find_inventory(inventory_file).device(device_name), model, source)
    else:
        with Client(socket or default_socket()) as client:
            outputs = client.infer(model, inputs)
    if out is not None:
        write_outputs(out, outputs)
    emit(described(model, outputs, values=out is None), as_text(outputs), as_json)


def ask_device(device: Device, model: str, source: Path) -> Arrays:
    """Send the file, have `edgertd infer` ask over there, and fetch the outputs. Nothing stays on the device."""
    transport = open_transport(device)
    remote = f"{device.state}/incoming/infer-{uuid.uuid4().hex}"
    try:
        transport.put(source, f"{remote}.in")  # for the daemon's user to read, who may be another
        words = ("infer", model, "--input", f"{remote}.in", "--out", f"{remote}.out")
        RemoteDaemon(transport, device).call(*words, timeout_s=ASK_S_MAX)
        with tempfile.TemporaryDirectory(prefix="edgert-infer-") as folder:
            back = Path(folder) / "outputs.npz"
            transport.get(f"{remote}.out", back)
            outputs = read_inputs(back)
        if not isinstance(outputs, dict):
            raise InputError(f"{device.name} answered with something else than outputs: bootstrap it again")
        return outputs
    finally:
        with contextlib.suppress(EdgeRTError):
            transport.run(["rm", "-f", f"{remote}.in", f"{remote}.out"], QUICK_S_MAX)
        transport.close()
