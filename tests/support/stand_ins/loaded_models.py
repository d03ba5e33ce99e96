"""A worker's models, loaded in the test's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edgert.bundle.signing import new_key
from edgert.config import DeviceConfig, read_config
from edgert.protocol import wire
from edgert.state_dir import StateDir
from edgert.tensors import DATATYPES
from edgert.versions.install import install
from edgert.versions.installed import InstalledVersion, load_live
from edgert.versions.slot_store import SlotStore
from edgert.worker.loading.model import LoadedModel, load_model
from edgert.worker.pipeline.batcher import Batcher
from edgert.worker.pipeline.cache import PredictionCache
from edgert.worker.pipeline.pipeline import Pipeline
from tests.support.bundles import make_null_bundle


def installed(folder: Path, config: str = "", **options: Any) -> tuple[InstalledVersion, StateDir, DeviceConfig]:
    """Install a null bundle made with `options` (see make_null_bundle), without a daemon."""
    state, key = StateDir(folder / "state"), new_key()
    state.keys.mkdir(parents=True)
    (state.keys / "test.pem").write_bytes(key.public.pem())
    state.config.write_text(f'device = "d-test"\nprofile = "this-machine"\n{config}')
    settings = read_config(state)
    install(make_null_bundle(folder / "bundles", key, **options), state, settings)
    store = SlotStore(state.models / options.get("model", "echo"))
    store.activate(60)
    return load_live(store, settings), state, settings


def loaded(folder: Path, config: str = "[serving]\nbatch_max = 4\n", **options: Any) -> LoadedModel:
    """Install and load a null bundle."""
    return load_model(*installed(folder, config, **options))


def pipeline_of(model: LoadedModel, cache_bytes: int = 0) -> Pipeline:
    """Return a pipeline of one engine session without near cache and shadow."""
    return Pipeline(model, Batcher(model.session, model.learned.batch_cap), PredictionCache(cache_bytes, 60.0))


def sent(*arrays: NDArray[Any]) -> tuple[wire.WireTensor, ...]:
    """Return the tensors of a request with these inputs, as the worker receives them."""
    return tuple(
        wire.WireTensor(i, DATATYPES[array.dtype.name], array.shape, memoryview(array.tobytes()))
        for i, array in enumerate(arrays)
    )
