"""The Open Inference Protocol and Triton's extensions, answered through the local client.

For inference, the endpoints use the daemon's socket like an app. For figures, they use the daemon's control socket.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from edgert import Client, __version__
from edgert.checks.status import SERVES, ask_daemon
from edgert.client.base import Priority
from edgert.client.blocking_connection import Connection
from edgert.client.conversation import Conversation, Retry
from edgert.errors import DeadlineExceeded, EdgeRTError, ModelNotFound, Unavailable
from edgert.http import metrics
from edgert.http.admission import busy
from edgert.http.browsers import address_of, from_another_site, host_name
from edgert.http.messages import BINARY_TYPE, JSON_TYPE, HttpError, HttpRequest, HttpResponse, json_response
from edgert.http.oip import LENGTH_HEADER, answer, read_request
from edgert.http.statistics import model_statistics
from edgert.machine import return_free_memory
from edgert.tensors import TensorSpec, batchable

TIMEOUT_S_MAX = 3600.0
READY_S_MAX = 5.0  # a worker that reacts later, although it does not load, is not ready
REQUEST_ITEMS_MAX = 1024  # docs/protocol.md, Limits
HIGHEST_PRIORITY = 1  # in Triton, 1 is the highest priority; the daemon has two priorities
EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "parameters",
    "schedule_policy",
    "statistics",
)
# A browser sends these types for any page, without a preflight request. The third such type, curl's default, is not in
# the list: a browser marks its own requests with Origin.
FORM_TYPES = ("text/plain", "multipart/form-data")
_LENGTH_HEADER = LENGTH_HEADER.lower()


class Endpoints:
    """Answers requests.

    With `host_checked`, only this machine can connect. Then a request with a foreign name as its Host comes from a web
    page whose name resolves to this address (DNS rebinding), and is refused. At most `inferences_max` requests infer at
    once.
    """

    def __init__(self, client: Client, control_socket: Path, *, host_checked: bool, inferences_max: int) -> None:
        self._client = client
        self._control_socket = control_socket
        self._host_checked = host_checked
        self._inferences_max = inferences_max
        self._permits = [None] * inferences_max  # pop and append are atomic, and cost less than Python's semaphore
        self._inferred = False  # whether a request inferred since the last call of `release_memory`
        self._labels: dict[str, tuple[int, tuple[str, ...]]] = {}
        self.responses: Counter[int] = Counter()
        # The parts of the path -> method and endpoint.
        self._of_server: dict[tuple[str, ...], tuple[str, Callable[[], HttpResponse]]] = {
            ("metrics",): ("GET", self._metrics),
            ("v2",): ("GET", self._server),
            ("v2", "health", "live"): ("GET", lambda: json_response({"live": True})),
            ("v2", "health", "ready"): ("GET", self._ready),
            ("v2", "models", "stats"): ("GET", self._all_statistics),
            ("v2", "repository", "index"): ("POST", self._index),
        }
        self._of_model: dict[tuple[str, ...], Callable[[str, str], HttpResponse]] = {
            (): self._metadata,
            ("ready",): self._model_ready,
            ("stats",): self._statistics,
            ("config",): self._config,
        }

    def handle(self, request: HttpRequest) -> HttpResponse:
        """Answer one request, even an invalid request. Many threads may call this at once."""
        try:
            if self._host_checked and not is_local_name(request.headers.get("host", "")):
                raise HttpError(
                    HTTPStatus.MISDIRECTED_REQUEST,
                    "this server answers only to localhost and to addresses: send such a Host, even through a proxy",
                )
            if from_another_site(request.method, request.headers):
                raise HttpError(
                    HTTPStatus.FORBIDDEN,
                    "requests that a browser makes for a page of another site are refused: send the request from an app",
                )
            response = self._route(request)
        except EdgeRTError as error:
            response = HttpError.of(error).response()
        except HttpError as error:
            response = error.response()
        self.responses[response.status] += 1
        return response

    def release_memory(self) -> bool:
        """Release the memory of earlier inferences, unless a request inferred since the last call.

        Returns whether it released memory.
        """
        if self._inferred:
            self._inferred = False
            return False
        self._client.close_idle()
        return_free_memory()
        return True

    # --- paths --------------------------------------------------------------------------------

    def _route(self, request: HttpRequest) -> HttpResponse:
        words = tuple(request.path.strip("/").split("/"))
        if words in self._of_server:
            method, endpoint = self._of_server[words]
            _expect(request, method)
            return endpoint()
        if words[:2] != ("v2", "models") or len(words) < 3:
            raise _no_such_path(request.path)
        # /v2/models/NAME [versions/V] [infer | ready | stats | config]
        model, version, rest = words[2], "", words[3:]
        if rest[:1] == ("versions",) and len(rest) > 1:
            version, rest = rest[1], rest[2:]
        if rest == ("infer",):
            _expect(request, "POST")
            try:
                permit = self._permits.pop()
            except IndexError:
                limit = f"{self._inferences_max} requests are in progress, the limit ([http] connections_max)"
                raise busy(limit) from None
            try:
                return self._infer(request, model, version)
            finally:
                self._permits.append(permit)
        if rest not in self._of_model:
            raise _no_such_path(request.path)
        _expect(request, "GET")
        return self._of_model[rest](model, version)

    # --- inference ----------------------------------------------------------------------------

    def _infer(self, request: HttpRequest, model: str, version: str) -> HttpResponse:
        self._inferred = True
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in FORM_TYPES:
            message = f"Content-Type {kind} is refused, because web forms send it: set Content-Type to {JSON_TYPE}, or {BINARY_TYPE} for binary tensors"
            raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)
        inference = read_request(request.body, request.headers.get(_LENGTH_HEADER))
        timeout_s = None if inference.timeout_s is None else min(inference.timeout_s, TIMEOUT_S_MAX)
        if version:
            self._served(model, version)
        priority: Priority = "high" if inference.priority == HIGHEST_PRIORITY else "normal"
        result = self._client.infer(model, inference.inputs, timeout_s=timeout_s, priority=priority, trace=True)
        if version and version != str(result.release):  # replaced since the check
            raise _not_served(model, version)
        labels: tuple[str, ...] = ()
        if inference.outputs is not None and any(output.classes for output in inference.outputs):
            labels = self._labels_of(model, result.release)
        return answer(inference, model, result.release, result.outputs, labels)

    def _labels_of(self, model: str, release: int) -> tuple[str, ...]:
        cached = self._labels.get(model)
        if cached is None or cached[0] != release:
            metadata = self._client.metadata(model)
            if metadata["release"] != release:
                raise Unavailable(
                    f"release {metadata['release']} replaced release {release} of model {model} during the request: "
                    "send the request again"
                )
            cached = self._labels[model] = (release, tuple(metadata.get("labels", ())))
        return cached[1]

    def _served(self, model: str, version: str) -> dict[str, Any]:
        """Return the daemon's entry for `model`. Raises ModelNotFound if `version` ("": any) is not served."""
        for served in self._client.models():
            if served["name"] == model and version in ("", str(served.get("release", version))):
                return served
        raise _not_served(model, version)

    # --- descriptions -------------------------------------------------------------------------

    def _server(self) -> HttpResponse:
        return json_response({"name": "edgert", "version": __version__, "extensions": list(EXTENSIONS)})

    def _ready(self) -> HttpResponse:
        models = self._client.models()
        # A model that loads on demand counts as ready.
        waited_for = [m["name"] for m in models if m["state"] not in (*SERVES, "unloaded", "stopped")]
        if waited_for:
            return _readiness(f"not ready: {', '.join(waited_for)}")
        return _readiness(self._hanging([m["name"] for m in models if m["state"] in SERVES]))

    def _model_ready(self, model: str, version: str) -> HttpResponse:
        state = self._served(model, version)["state"]
        return _readiness(self._hangs(model) if state in SERVES else f"model {model} is {state}")

    def _hanging(self, models: list[str]) -> str:
        """Return which workers of `models` do not react; ask all at once, because each may take READY_S_MAX."""
        faults: dict[str, str] = {}
        threads = [threading.Thread(target=lambda name=m: faults.update({name: self._hangs(name)})) for m in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return "; ".join(faults[model] for model in models if faults[model])

    def _hangs(self, model: str) -> str:
        """Return the reason why the worker of `model` is not ready, or "" if it reacts to a connection.

        The connection also lets the daemon notice a worker that hangs.
        """
        path = self._client.path
        try:
            Connection(path, Conversation(model, path, share=False, probe=True), time.monotonic() + READY_S_MAX).close()
        except DeadlineExceeded:
            return f"the worker of model {model} does not react"
        except (EdgeRTError, Retry):  # a worker that refuses a connection reacts
            pass
        return ""

    def _index(self) -> HttpResponse:
        index = []
        for model in self._client.models():
            state = "READY" if model["state"] in SERVES else "UNAVAILABLE"
            reason = "" if state == "READY" else model["state"]
            index.append(
                {"name": model["name"], "version": str(model.get("release", "")), "state": state, "reason": reason}
            )
        return json_response(index)

    def _metadata(self, model: str, version: str) -> HttpResponse:
        metadata = self._metadata_of(model, version)
        return json_response(
            {
                "name": model,
                "versions": [str(metadata["release"])],
                "platform": f"edgert_{metadata['engine']}",
                "inputs": metadata["inputs"],
                "outputs": metadata["outputs"],
            }
        )

    def _config(self, model: str, version: str) -> HttpResponse:
        """Return the fields of Triton's model configuration that load generators read."""
        metadata = self._metadata_of(model, version)
        inputs = [TensorSpec.from_json(v) for v in metadata["inputs"]]
        batched = batchable(inputs)
        return json_response(
            {
                "name": model,
                "platform": f"edgert_{metadata['engine']}",
                "backend": "edgert",
                "runtime": str(metadata["engine"]),
                "version_policy": {"specific": {"versions": [metadata["release"]]}},
                "max_batch_size": REQUEST_ITEMS_MAX if batched else 0,
                "input": [_config_tensor(spec, batched) for spec in inputs],
                "output": [_config_tensor(TensorSpec.from_json(v), batched) for v in metadata["outputs"]],
                "instance_group": [],
                "parameters": {},
                **({"dynamic_batching": {}} if batched else {}),
            }
        )

    def _metadata_of(self, model: str, version: str) -> dict[str, Any]:
        metadata = self._client.metadata(model)
        if version and version != str(metadata["release"]):
            raise ModelNotFound(
                f"model {model[:80]!r} is served in version {metadata['release']}, not {version[:20]!r}: "
                "request this version, or omit /versions"
            )
        return metadata

    # --- figures ------------------------------------------------------------------------------

    def _statistics(self, model: str, version: str) -> HttpResponse:
        status = ask_daemon(self._control_socket).models.get(model)
        release = status.loaded.release if status is not None and status.loaded is not None else None
        if status is None or (version and version != str(release)):
            raise _not_served(model, version)
        return json_response({"model_stats": [model_statistics(model, status)]})

    def _all_statistics(self) -> HttpResponse:
        models = ask_daemon(self._control_socket).models
        return json_response({"model_stats": [model_statistics(name, status) for name, status in models.items()]})

    def _metrics(self) -> HttpResponse:
        try:
            status = ask_daemon(self._control_socket)
        except EdgeRTError:  # the answer then has edgert_up 0
            status = None
        return HttpResponse(
            HTTPStatus.OK, (metrics.exposition(status, self.responses.copy(), __version__),), metrics.CONTENT_TYPE
        )


def is_local_name(host: str) -> bool:
    """Return whether a Host field is an address or localhost."""
    name = host_name(host)
    return name in ("", "localhost") or address_of(name) is not None


def _readiness(reason: str) -> HttpResponse:
    if reason:
        raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, reason, retry_after_s=1.0)
    return json_response({"ready": True})


def _config_tensor(spec: TensorSpec, batched: bool) -> dict[str, Any]:
    return {
        "name": spec.name,
        "data_type": f"TYPE_{spec.datatype}",
        "dims": list(spec.shape[1:] if batched else spec.shape),
    }


def _not_served(model: str, version: str) -> ModelNotFound:
    return ModelNotFound(f"model {model[:80]!r} is not served" + (f" in version {version[:20]!r}" if version else ""))


def _expect(request: HttpRequest, method: str) -> None:
    methods = ("GET", "HEAD") if method == "GET" else (method,)
    if request.method not in methods:
        message = f"{request.path[:80]} takes {' or '.join(methods)}"
        raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, message, allow=", ".join(methods))


def _no_such_path(path: str) -> HttpError:
    return HttpError(HTTPStatus.NOT_FOUND, f"there is no endpoint {path[:80]!r}; docs/http.md lists them")
