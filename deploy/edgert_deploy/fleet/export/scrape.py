"""The server that Prometheus scrapes: `/metrics` in the requested format, and `/healthz`."""

from __future__ import annotations

import threading

from edgert.http.messages import HttpRequest, HttpResponse
from edgert.http.metrics import CONTENT_TYPE
from edgert_deploy.fleet.export.prometheus import PROTOBUF, Exposition
from edgert_deploy.fleet.web import WebServer


def scrape_server(exposition: Exposition, host: str, port: int) -> WebServer:
    """Serve an exposition on `host`:`port` from a thread. Port 0 means a free port. Raises ConfigInvalid."""
    drawing = threading.Lock()  # one scrape at a time, because a second scrape would render the same text again

    def answer(request: HttpRequest) -> HttpResponse:
        if request.path == "/healthz":
            return HttpResponse(200, (b"ok\n",), "text/plain")
        if request.path != "/metrics":
            return HttpResponse(404, (b"this is an edgert exporter: see /metrics\n",), "text/plain")
        accepts = request.headers.get("accept", "")
        with drawing:
            if "application/vnd.google.protobuf" in accepts and "MetricFamily" in accepts:
                return HttpResponse(200, (exposition.protobuf(),), PROTOBUF)
            return HttpResponse(200, (exposition.text().encode(),), CONTENT_TYPE)

    return WebServer(answer, host, port, "scrape")
