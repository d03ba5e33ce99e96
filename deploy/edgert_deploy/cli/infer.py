"""`edgert infer`: send one request to a daemon, on this machine or on a device."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from pathlib import Path

import click
import numpy as np

from edgert import Client
from edgert.cli.output import emit, json_option
from edgert.cli.tensor_files import Arrays, as_text, ask, read_inputs, write_outputs
from edgert.cli.tensor_files import as_json as described
from edgert.errors import DaemonUnreachable, DeviceError, EdgeRTError
from edgert.state_dir import default_socket
from edgert_deploy.cli.shared.options import device_argument, inventory_option
from edgert_deploy.cli.shared.types import FILE, ModelName
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.remote_daemon import QUICK_S_MAX, RemoteDaemon
from edgert_deploy.devices.transports import in_folder, open_transport

ASK_S_MAX = 300.0


@click.command()
@click.argument("model", type=ModelName())
@device_argument(required=False)
@click.option(
    "--input",
    "source",
    type=FILE,
    help="A .npy array, an .npz with one array for each input name, or a JPEG, PNG, WAV, CSV or .txt file.",
)
@click.option("--text", help="A text, in place of --input.")
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The daemon's socket [default: $EDGERT_SOCKET, else this machine's].",
)
@click.option("--out", type=FILE, help="Write the complete outputs as .npz; --json then omits the values.")
@inventory_option
@json_option
def infer(
    model: str,
    selector: str | None,
    source: Path | None,
    text: str | None,
    socket: Path | None,
    out: Path | None,
    inventory: Inventory,
    as_json: bool,
) -> None:
    """Send one request for MODEL to a running daemon and show the answer.

    Without SELECTOR, the request goes to this machine's daemon. With the SELECTOR of one device, the command sends the
    file to this device; the answer has at most 16 MB as JSON. The exit code is 4 if the file cannot be used, 6 if the
    device cannot be reached, and 8 if the request fails.

    \b
    Examples:
      edgert infer digits kitchen --input images.npy
      edgert infer classifier kitchen --input photo.jpg
      edgert infer intents kitchen --text "switch on the lamp"
      edgert infer detector --input frame.npz --socket /run/edgert/edgert.sock --json
    """
    if socket is not None and selector is not None:
        raise click.UsageError("SELECTOR and --socket exclude each other: choose one")
    if (source is None) == (text is None):
        raise click.UsageError("give either --input or --text")
    if text is not None and not text.strip():
        raise click.UsageError("--text is empty: give a text")
    with tempfile.TemporaryDirectory(prefix="edgert-infer-") as folder:
        if source is None:
            source = Path(folder) / "text.txt"
            source.write_bytes((text or "").encode(errors="surrogateescape"))
        inputs = read_inputs(source)  # reports an unreadable file before the command sends the file
        if selector is not None:
            outputs, names = ask_device(inventory.device(selector), model, source)
        else:
            try:
                with Client(socket or default_socket()) as client:
                    outputs, names = ask(client, model, inputs, is_text=source.suffix == ".txt")
            except DaemonUnreachable as error:
                raise DaemonUnreachable(
                    f"{error.message}. For a model on a device: edgert infer {model} DEVICE"
                ) from error
    if out is not None:
        write_outputs(out, outputs)
    emit(described(model, outputs, names, values=out is None), as_text(outputs, names), as_json)


def ask_device(device: Device, model: str, source: Path) -> tuple[Arrays, Arrays]:
    """Run `edgertd infer` on a copy of the file; return the outputs and the names of their classes."""
    transport = open_transport(device)
    incoming = f"{device.state}/incoming"
    file_name = f"infer-{uuid.uuid4().hex}{'.txt' if source.suffix == '.txt' else ''}"
    try:
        transport.put(source, f"{incoming}/{file_name}")  # the daemon's user may differ from the login's user
        words = ("infer", model, "--input", f"{incoming}/{file_name}")
        answered = RemoteDaemon(transport, device).call(*words, timeout_s=ASK_S_MAX)["outputs"]
        outputs = {
            name: np.array(array["values"], array["dtype"]).reshape(array["shape"]) for name, array in answered.items()
        }
        names = {name: np.array(array["labels"], object) for name, array in answered.items() if "labels" in array}
        return outputs, names
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DeviceError(
            f"{device.name}: the answer of `edgertd infer` cannot be read: {error!r}. If it has another version of edgert, "
            f"upgrade it with: edgert bootstrap {device.name} --upgrade"
        ) from error
    finally:
        with contextlib.suppress(EdgeRTError):
            transport.run(in_folder(incoming, ["rm", "-f", f"./{file_name}"]), QUICK_S_MAX)
        transport.close()
