"""The endpoints: paths of the Open Inference Protocol and Triton's extensions, answered through the local client.

It asks as any app does: inference over the daemon's socket, figures over its control socket.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from edgert import Client, __version__
from edgert.checks.status import SERVES, ask_daemon
from edgert.client.base import Priority
from edgert.errors import EdgeRTError, ModelNotFound
from edgert.http import metrics
from edgert.http.messages import HttpError, HttpRequest, HttpResponse, json_response
from edgert.http.oip import LENGTH_HEADER, answer, read_question
from edgert.http.statistics import model_statistics
from edgert.tensors import TensorSpec, batchable

TIMEOUT_S_MAX = 3600.0
REQUEST_ITEMS_MAX = 1024  # docs/protocol.md, Limits
HIGHEST_PRIORITY = 1  # Triton counts from the highest; the daemon has two classes
EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "parameters",
    "schedule_policy",
    "statistics",
)
_LENGTH_HEADER = LENGTH_HEADER.lower()


class Endpoints:
    """`client` and `control_socket` lead to the daemon. `host_checked` refuses requests made for other names.

    Where only this machine can connect, a request whose Host is a foreign name was sent by a web page that has
    bent its own name to this address; it must not be answered.
    """

    def __init__(self, client: Client, control_socket: Path, *, host_checked: bool) -> None:
        self._client, self._control_socket, self._host_checked = client, control_socket, host_checked
        self._labels: dict[str, tuple[int, tuple[str, ...]]] = {}
        self.responses: Counter[int] = Counter()

    def handle(self, request: HttpRequest) -> HttpResponse:
        """Answer one request; may be called from many threads at once. Never raises for the request's sake."""
        try:
            if self._host_checked and not is_local_name(request.headers.get("host", "")):
                raise HttpError(HTTPStatus.MISDIRECTED_REQUEST, "this server answers to localhost and addresses only")
            response = self._route(request)
        except EdgeRTError as error:
            response = HttpError.of(error).response()
        except HttpError as error:
            response = error.response()
        self.responses[response.status] += 1
        return response

    # --- paths --------------------------------------------------------------------------------

    def _route(self, request: HttpRequest) -> HttpResponse:
        words = request.path.strip("/").split("/")
        if words == ["metrics"]:
            return self._get(request, self._metrics)
        if words[0] != "v2":
            raise _no_such_path(request.path)
        if words[1:2] == ["models"] and len(words) > 2:
            return self._route_model(request, words[2:])
        if words == ["v2", "repository", "index"]:
            _expect(request, "POST")
            return self._index()
        endpoints: dict[tuple[str, ...], Callable[[], HttpResponse]] = {
            (): self._server,
            ("health", "live"): lambda: json_response({"live": True}),
            ("health", "ready"): self._ready,
        }
        endpoint = endpoints.get(tuple(words[1:]))
        if endpoint is None:
            raise _no_such_path(request.path)
        return self._get(request, endpoint)

    def _route_model(self, request: HttpRequest, words: list[str]) -> HttpResponse:
        """`words` is what follows /v2/models: NAME [versions V] [infer | ready | stats | config], or stats."""
        if words == ["stats"]:
            return self._get(request, self._all_statistics)
        model, version = words[0], ""
        rest = words[1:]
        if rest[:1] == ["versions"] and len(rest) > 1:
            version, rest = rest[1], rest[2:]
        if rest == ["infer"]:
            _expect(request, "POST")
            return self._infer(request, model, version)
        endpoints: dict[tuple[str, ...], Callable[[str, str], HttpResponse]] = {
            (): self._metadata,
            ("ready",): self._model_ready,
            ("stats",): self._statistics,
            ("config",): self._config,
        }
        endpoint = endpoints.get(tuple(rest))
        if endpoint is None:
            raise _no_such_path(request.path)
        found = endpoint
        return self._get(request, lambda: found(model, version))

    def _get(self, request: HttpRequest, endpoint: Callable[[], HttpResponse]) -> HttpResponse:
        _expect(request, "GET", "HEAD")
        return endpoint()

    # --- inference ----------------------------------------------------------------------------

    def _infer(self, request: HttpRequest, model: str, version: str) -> HttpResponse:
        question = read_question(request.body, request.headers.get(_LENGTH_HEADER))
        timeout_s = question.timeout_s
        if timeout_s is not None:
            timeout_s = min(timeout_s, TIMEOUT_S_MAX)
        if version:
            self._check_version(model, version)
        priority: Priority = "high" if question.priority == HIGHEST_PRIORITY else "normal"
        given = self._client.infer(model, question.inputs, timeout_s=timeout_s, priority=priority, trace=True)
        labels: tuple[str, ...] = ()
        if question.outputs is not None and any(want.classes for want in question.outputs):
            labels = self._labels_of(model, given.release)
        return answer(question, model, given.release, given.outputs, labels)

    def _labels_of(self, model: str, release: int) -> tuple[str, ...]:
        known = self._labels.get(model)
        if known is None or known[0] != release:
            known = self._labels[model] = (release, tuple(self._client.metadata(model).get("labels", ())))
        return known[1]

    def _check_version(self, model: str, version: str) -> None:
        """A version is a release number; only the one that serves can be asked."""
        served = next((m for m in self._client.models() if m["name"] == model), None)
        if served is None or str(served.get("release", version)) != version:
            raise ModelNotFound(f"model {model[:80]!r} is not served in version {version[:20]!r}")

    # --- what is there ------------------------------------------------------------------------

    def _server(self) -> HttpResponse:
        return json_response({"name": "edgert", "version": __version__, "extensions": list(EXTENSIONS)})

    def _ready(self) -> HttpResponse:
        # A model that is loaded on demand is as ready as it needs to be.
        waited_for = [m["name"] for m in self._client.models() if m["state"] not in (*SERVES, "unloaded", "stopped")]
        return _readiness(f"not ready: {', '.join(waited_for)}" if waited_for else "")

    def _model_ready(self, model: str, version: str) -> HttpResponse:
        served = next((m for m in self._client.models() if m["name"] == model), None)
        if served is None:
            raise ModelNotFound(f"no model is called {model[:80]!r} here")
        if version:
            self._check_version(model, version)
        return _readiness("" if served["state"] in SERVES else f"model {model} is {served['state']}")

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
        told = self._told(model, version)
        return json_response(
            {
                "name": model,
                "versions": [str(told["release"])],
                "platform": f"edgert_{told['engine']}",
                "inputs": told["inputs"],
                "outputs": told["outputs"],
            }
        )

    def _config(self, model: str, version: str) -> HttpResponse:
        """Triton's model configuration, as far as load generators read it."""
        told = self._told(model, version)
        inputs = [TensorSpec.from_json(v) for v in told["inputs"]]
        batched = batchable(inputs)
        return json_response(
            {
                "name": model,
                "platform": f"edgert_{told['engine']}",
                "backend": "edgert",
                "runtime": str(told["engine"]),
                "version_policy": {"specific": {"versions": [told["release"]]}},
                "max_batch_size": REQUEST_ITEMS_MAX if batched else 0,
                "input": [_config_tensor(spec, batched) for spec in inputs],
                "output": [_config_tensor(TensorSpec.from_json(v), batched) for v in told["outputs"]],
                "instance_group": [],
                "parameters": {},
                **({"dynamic_batching": {}} if batched else {}),
            }
        )

    def _told(self, model: str, version: str) -> dict[str, Any]:
        told = self._client.metadata(model)
        if version and version != str(told["release"]):
            raise ModelNotFound(f"model {model[:80]!r} is served in version {told['release']}, not {version[:20]!r}")
        return told

    # --- figures ------------------------------------------------------------------------------

    def _statistics(self, model: str, version: str) -> HttpResponse:
        status = ask_daemon(self._control_socket).models.get(model)
        release = status.loaded.release if status is not None and status.loaded is not None else None
        if status is None or (version and version != str(release)):
            raise ModelNotFound(
                f"model {model[:80]!r} is not served" + (f" in version {version[:20]!r}" if version else "")
            )
        return json_response({"model_stats": [model_statistics(model, status)]})

    def _all_statistics(self) -> HttpResponse:
        models = ask_daemon(self._control_socket).models
        return json_response({"model_stats": [model_statistics(name, status) for name, status in models.items()]})

    def _metrics(self) -> HttpResponse:
        try:
            status = ask_daemon(self._control_socket)
        except EdgeRTError:  # reported as edgert_up 0
            status = None
        return HttpResponse(
            HTTPStatus.OK, (metrics.exposition(status, self.responses.copy(), __version__),), metrics.CONTENT_TYPE
        )


def is_local_name(host: str) -> bool:
    """Whether a Host field names this machine by an address or as localhost."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if name.lower() in ("", "localhost"):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


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


def _expect(request: HttpRequest, *methods: str) -> None:
    if request.method not in methods:
        message = f"{request.path[:80]} takes {' or '.join(methods)}"
        raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, message, allow=", ".join(methods))


def _no_such_path(path: str) -> HttpError:
    return HttpError(HTTPStatus.NOT_FOUND, f"nothing is served at {path[:80]!r}; see docs/http.md")
