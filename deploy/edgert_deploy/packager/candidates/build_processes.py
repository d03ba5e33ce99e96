"""Builds in child processes, so that a crash of a vendor's native code ends only one child.

The build needs some artifacts for any decision of the accuracy gate. `prebuild` builds these artifacts in parallel, in
as many children as cores and free memory allow. The build flow then finds these artifacts in the cache. So the flow
stays a plain sequence, and it times artifacts on a quiet machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from edgert.errors import BuildFailed, EdgeRTError
from edgert.machine import mem_available_bytes
from edgert.typed_json import from_json, to_json
from edgert_deploy.common.file_cache import FileCache
from edgert_deploy.packager.accuracy.activation_ranges import Activation, activations
from edgert_deploy.packager.accuracy.sensitivity import Harm, Sensitivity
from edgert_deploy.packager.build_cache import cache_key, inputs_digest
from edgert_deploy.packager.builders import Artifact, BuildSpec, builder_for
from edgert_deploy.packager.builders.layers import Layer, layers_of
from edgert_deploy.packager.builders.qdq import Recipe, prepared
from edgert_deploy.packager.processes import children, sandbox
from edgert_deploy.packager.processes.sandbox import Progress
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel

# A smaller model builds as fast as a child imports its tools, so parallel builds gain nothing.
SOURCE_BYTES_MIN = 4 * 1024**2
# A child needs CHILD_BYTES for its tools, COPIES_OF_SOURCE times the model, and COPIES_OF_SAMPLES times the samples.
CHILD_BYTES = 700 * 1024**2
COPIES_OF_SOURCE = 14
COPIES_OF_SAMPLES = 3
KILL_PAUSE_S = 0.1  # the pause between two attempts to end the busy children of cancelled builds
MEMORY_SHARE = 0.8
FROM_CACHE = ", taken from the build cache"
DESCRIPTION_FILE = "artifact.json"  # the description of an artifact, beside its files


class BuildProcesses:
    """Builds artifacts of one source with one set of samples. Children read both from a file in `folder`."""

    def __init__(self, folder: Path, source: SourceModel, calibration: CalibrationSet, cache: FileCache) -> None:
        self._inputs = folder / "inputs"
        self._digest = inputs_digest(source, calibration)
        self._source = source
        self._calibration = calibration
        self._cache = cache
        self._lock = threading.Lock()

    def cached(self, spec: BuildSpec, out_dir: Path) -> Artifact | None:
        """Return the artifact from the cache; None if the cache lacks it."""
        if not self._cache.get(self.key(spec), out_dir):
            return None
        return Artifact.from_json(json.loads((out_dir / DESCRIPTION_FILE).read_bytes()), out_dir)

    def build(self, spec: BuildSpec, out_dir: Path, progress: Progress) -> Artifact:
        """Build the artifact in a child, and store it in the cache. Raises BuildFailed, also after a crash."""
        steps = [f"{spec.engine}: starting"]

        def noted(line: str) -> None:
            steps.append(line)
            progress(line)

        request = {"inputs": self._written_inputs(), "out": str(out_dir)}
        try:
            answer, _ = children.call(f"{__name__}:build_in_child", request, pickle.dumps(spec), noted)
        except sandbox.ChildFailed as error:
            raise BuildFailed(_failure_text(error, spec, self._source.path.name, steps[-1])) from error
        artifact = Artifact.from_json(answer, out_dir)
        described = out_dir / DESCRIPTION_FILE
        described.write_text(json.dumps(answer))
        self._cache.put(self.key(spec), [described, artifact.path, *artifact.companions])
        return artifact

    def is_cached(self, spec: BuildSpec) -> bool:
        return bool(self._cache.find(self.key(spec)))

    def key(self, spec: BuildSpec, recipe: Recipe | None = None) -> str:
        """Return the `cache_key` of an artifact, or of the harm of its layers by `recipe`."""
        return cache_key(self._digest, spec, recipe)

    def activations(self, progress: Progress) -> tuple[Activation, ...]:
        """Return the ranges of the layers' answers. Return none if the model is not ONNX, or after a crash.

        Raises BuildFailed for any other error.
        """
        if self._source.kind != "onnx":
            return ()
        request = {"inputs": self._written_inputs()}
        try:
            answer, _ = children.call(f"{__name__}:activations_in_child", request, progress=progress)
        except sandbox.ChildFailed as error:
            if error.cause == "error":
                what = f"the ranges of the layers' answers cannot be measured: {error.detail}"
                raise BuildFailed(f"{what}; this is a fault of edgert, please report it") from error
            return ()
        return tuple(from_json(Activation, each) for each in answer["activations"])

    def layers(self) -> tuple[Layer, ...]:
        """Return the layers of the source, prepared for the quantizer. Raises BuildFailed."""
        answer = self._measure(f"{__name__}:layers_in_child", b"", "the model was prepared")
        return tuple(from_json(Layer, each) for each in answer["layers"])

    def harm(self, layer: Layer, recipe: Recipe) -> Harm:
        """Return the harm if only `layer` is in INT8, quantized by `recipe`. Raises BuildFailed."""
        doing = f"the harm of quantizing {layer.op} {layer.name!r} was measured"
        answer = self._measure(f"{__name__}:harm_in_child", pickle.dumps((layer, recipe)), doing)
        return Harm(layer, float(answer["sqnr_db"]))

    def _measure(self, function: str, payload: bytes, doing: str) -> dict[str, Any]:
        try:
            return children.call(function, {"inputs": self._written_inputs()}, payload)[0]
        except sandbox.ChildFailed as error:
            raise BuildFailed(
                f"onnxruntime {children.cause_text(error)} while {doing} for mixed precision; build this target with "
                "--precision fp16 or fp32, or with --budget 0"
            ) from error

    def _written_inputs(self) -> str:
        """Return the file with the source and the samples. Write the file at the first call."""
        with self._lock:
            if not self._inputs.exists():
                with self._inputs.open("wb") as file:
                    pickle.dump((self._source, self._calibration), file, protocol=5)
        return str(self._inputs)

    def prebuild(self, specs: Sequence[BuildSpec], progress: Progress, processes: int = 0) -> None:
        """Build the artifacts of `specs` that the cache lacks.

        With 0 `processes`, as many builds run at once as fit. With 1, this function builds nothing, because the build
        flow builds the artifacts. If a build fails, the build flow gets the same error again and handles it.
        """
        missing = {self.key(spec): spec for spec in specs}
        missing = {key: spec for key, spec in missing.items() if not self._cache.find(key)}
        if not processes:
            small = self._source.size_bytes < SOURCE_BYTES_MIN
            processes = 1 if small else _processes(self._source, self._calibration)
        if min(processes, len(missing)) < 2:
            return

        def build(spec: BuildSpec) -> None:
            progress(f"{spec.profile.name}: building {spec.engine} {spec.precision}")
            with tempfile.TemporaryDirectory(dir=self._inputs.parent) as folder, contextlib.suppress(EdgeRTError):
                self.build(spec, Path(folder), progress)

        with ThreadPoolExecutor(processes) as pool:
            builds = [pool.submit(build, spec) for spec in missing.values()]
            try:
                for future in builds:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                running = [future for future in builds if not future.cancelled()]
                while wait(running, timeout=KILL_PAUSE_S).not_done:
                    children.kill_busy_children()  # the threads that wait for these children then end
                raise


def free_memory_bytes() -> int:
    """Return the memory that is free without swapping: MemAvailable, or less if a control group limits it."""
    free, group = mem_available_bytes() or 0, Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # a file is absent, or holds "max"
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, free)


def _processes(source: SourceModel, calibration: CalibrationSet) -> int:
    samples = sum(array.nbytes for array in calibration.inputs.values())
    each = CHILD_BYTES + COPIES_OF_SOURCE * source.size_bytes + COPIES_OF_SAMPLES * samples
    return min(len(os.sched_getaffinity(0)), int(MEMORY_SHARE * free_memory_bytes() / each))


def _failure_text(failed: sandbox.ChildFailed, spec: BuildSpec, model: str, step: str) -> str:
    advice = {
        "memory": "free some memory, give fewer calibration samples, or build one artifact at a time with --jobs 1",
        "time": "give fewer calibration samples",
    }.get(failed.cause, "this is a fault of the engine's tools: try --precision fp32")
    return (
        f"the {spec.engine} builder {children.cause_text(failed)} on {model} after {step!r}; {advice}, "
        f"or remove {spec.engine} from the profile's engines"
    )


# --- functions that run in a child


def build_in_child(request: dict[str, Any], payload: bytes, progress: Progress) -> sandbox.Answer:
    """Build the pickled BuildSpec `payload`: the child's side of `BuildProcesses.build`."""
    source, calibration = _read_inputs(request["inputs"])
    spec: BuildSpec = pickle.loads(payload)
    return builder_for(spec.engine).build(spec, source, calibration, Path(request["out"]), progress).as_json(), b""


def activations_in_child(request: dict[str, Any], payload: bytes, progress: Progress) -> sandbox.Answer:
    """Measure the ranges: the child's side of `BuildProcesses.activations`."""
    return {"activations": [to_json(each) for each in activations(*_read_inputs(request["inputs"]))]}, b""


def layers_in_child(request: dict[str, Any], payload: bytes, progress: Progress) -> sandbox.Answer:
    """Find the layers: the child's side of `BuildProcesses.layers`."""
    source, _ = _read_inputs(request["inputs"])
    return {"layers": [to_json(layer) for layer in layers_of(prepared(source))]}, b""


def harm_in_child(request: dict[str, Any], payload: bytes, progress: Progress) -> sandbox.Answer:
    """Measure one layer: the child's side of `BuildProcesses.harm`. Keep the ranges for the next layer."""
    source, calibration = _read_inputs(request["inputs"])
    layer, recipe = pickle.loads(payload)
    if repr(recipe) not in _sensitivities:
        _sensitivities.clear()
        _sensitivities[repr(recipe)] = Sensitivity(prepared(source), calibration, recipe)
    return {"sqnr_db": _sensitivities[repr(recipe)].of(layer).sqnr_db}, b""


_last_inputs: dict[str, tuple[SourceModel, CalibrationSet]] = {}
_sensitivities: dict[str, Sensitivity] = {}


def _read_inputs(path: str) -> tuple[SourceModel, CalibrationSet]:
    """Return the source and the samples in the file `path`.

    If the last request was for the same file, do not read the file again.

    From now on, this child writes its temporary files into the folder of the file.
    """
    children.put_temporary_files_into(Path(path).parent)
    if path not in _last_inputs:
        _last_inputs.clear()
        _sensitivities.clear()
        with open(path, "rb") as file:
            _last_inputs[path] = pickle.load(file)
    return _last_inputs[path]
