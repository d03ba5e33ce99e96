"""Recordings for a model with state: each sample gets the state after the previous sample."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.state import State, check_state
from edgert.engines import EngineOptions, Session, engine_by_name
from edgert.errors import CalibrationInvalid, ConfigInvalid
from edgert.toml_file import about, from_table, parse_toml, read_text
from edgert_deploy.packager.processes.children import arrays_of, cause_text
from edgert_deploy.packager.processes.sandbox import ChildFailed
from edgert_deploy.packager.processes.vendor_output import quiet
from edgert_deploy.packager.samples.lengths import Arrays
from edgert_deploy.packager.sources.source_model import SourceModel, reference_artifact, reference_engine

TABLE = "state"  # the tables [[state]] of a processing file
ID = "state_id"  # a key of a processing file
FILE_BYTES_MAX = 16 * 1024**2
TOGETHER = 32  # the number of recordings that run together, if the batch axis is open


def read_state(path: Path, source: SourceModel) -> tuple[tuple[State, ...], str]:
    """Return the state that a processing file binds, and its `state_id`. Raises ConfigInvalid."""
    if not path.is_file():
        return (), ""
    values = parse_toml(read_text(path, FILE_BYTES_MAX), str(path))
    tables, state_id = values.get(TABLE, []), values.get(ID, "")
    if not isinstance(tables, list):
        raise ConfigInvalid(f"{path}: write [[{TABLE}]] in double brackets, once for each state")
    if not isinstance(state_id, str):
        raise ConfigInvalid(f"{path}: {ID} = {state_id!r} is not text: put it in quotes")
    state = tuple(from_table(State, table, f"{path}, table [[{TABLE}]]") for table in tables)
    with about(path):
        check_state(state, state_id, source.inputs, source.outputs)
    return state, state_id


def with_state(path: Path, source: SourceModel, inputs: Arrays, recordings: NDArray[np.int64] | None) -> Arrays:
    """Return the samples, each with the state that FP32 has before this sample. Raises CalibrationInvalid.

    Args:
        path: The samples' file, for messages.
        inputs: The samples without state.
        recordings: The number of each sample's recording.
    """
    if recordings is None:
        raise CalibrationInvalid(
            f"the model has state, and {path} does not define the order of its samples: give a folder of recordings, or an "
            "array `recording` with one number for each sample, in the order of time"
        )
    try:
        before = arrays_of(f"{__name__}:states_before", inputs, source, recordings)
    except ChildFailed as error:
        raise CalibrationInvalid(
            f"{path}: the model cannot answer these samples one after another: {reference_engine(source)} "
            f"{cause_text(error)}. Check that the samples' values are valid for the model"
        ) from error
    return {**inputs, **{binding.input: array for binding, array in zip(source.state, before, strict=True)}}


def states_before(inputs: Arrays, source: SourceModel, recordings: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Return the values of each state before each sample: the child's side of `with_state`."""
    with tempfile.TemporaryDirectory() as folder:
        artifact = reference_artifact(source, Path(folder))
        with quiet():
            session = engine_by_name(artifact.engine).load(artifact, EngineOptions(threads=0))
        try:
            _, before = run_in_turn(session, inputs, recordings, source.state)
        finally:
            session.close()
    return [before[binding.input] for binding in source.state]


def run_in_turn(
    session: Session, inputs: Mapping[str, NDArray[Any]], recordings: NDArray[np.int64], state: Sequence[State]
) -> tuple[list[NDArray[Any]], Arrays]:
    """Run the samples of each recording in order. Each sample gets the state after the previous sample.

    Returns the answers, one array for each output, and the values of each state before each sample. All arrays are in
    the order of the samples.

    Args:
        inputs: The samples without state.
        recordings: The number of each sample's recording.
        state: The outputs that become inputs.
    """
    specs = {spec.name: spec for spec in session.inputs}
    places = {one.input: [spec.name for spec in session.outputs].index(one.output) for one in state}
    rows = sorted((np.flatnonzero(recordings == number) for number in np.unique(recordings)), key=len, reverse=True)
    together = TOGETHER if session.inputs[0].shape[0] == -1 else 1
    count = len(recordings)
    before = {name: np.zeros((count, *specs[name].item_shape), specs[name].dtype) for name in places}
    answers: list[NDArray[Any]] = []
    for begin in range(0, len(rows), together):
        group = rows[begin : begin + together]
        for step in range(len(group[0])):
            now = np.array([one[step] for one in group if step < len(one)])  # `group` has the longest first
            feeds = [before[name][now] if name in before else inputs[name][now] for name in specs]
            outputs = session.run(feeds)
            if not answers:
                answers = [np.empty((count, *array.shape[1:]), array.dtype) for array in outputs]
            for whole, array in zip(answers, outputs, strict=True):
                whole[now] = array
            following = [(i, one[step + 1]) for i, one in enumerate(group) if step + 1 < len(one)]
            for name, at in places.items():
                for i, row in following:
                    before[name][row] = outputs[at][i]
    return answers, before
