"""`edgertd infer`."""

from __future__ import annotations

from pathlib import Path

import click

from edgert.cli.output import emit, json_option
from edgert.config import read_config
from edgert.state_dir import StateDir

FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("model")
@click.option(
    "--input",
    "source",
    required=True,
    type=FILE,
    help="A .npy array, an .npz with one array per input name, or a JPEG, PNG, WAV, CSV or .txt file.",
)
@click.option("--out", type=FILE, help="Write the outputs to this .npz file; --json then omits the values.")
@json_option
@click.pass_obj
def infer(state: StateDir, model: str, source: Path, out: Path | None, as_json: bool) -> None:
    """Send a request to MODEL through the daemon's socket, like an app.

    The exit code is 4 if the file cannot be used, and 8 if the request fails or no daemon runs.

    \b
    Examples:
      edgertd infer digits --input images.npy
      edgertd infer detector --input frame.npz --out boxes.npz --json
    """
    from edgert import Client
    from edgert.cli import tensor_files

    inputs = tensor_files.read_inputs(source)
    with Client(state.socket(read_config(state).socket)) as client:
        outputs, names = tensor_files.ask(client, model, inputs, is_text=source.suffix == ".txt")
    if out is not None:
        tensor_files.write_outputs(out, outputs)
    emit(tensor_files.as_json(model, outputs, names, values=out is None), tensor_files.as_text(outputs, names), as_json)
