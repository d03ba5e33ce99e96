"""Switches the SDKs' own telemetry off: EdgeRT does not report to its vendors' clouds.

Observed: onnxruntime 1.31 keeps a device id and an event store in ~/.cache/Microsoft, and contains the address
mobile.events.data.microsoft.com. An import of openvino 2026.4 writes an analytics client id to ~/intel. NNCF sends its
call arguments. An SDK's telemetry can be switched off only before the SDK is imported.
"""

from __future__ import annotations

import os
import sys


def stop_reporting() -> None:
    """Switch off the telemetry of SDKs that are imported later, here and in child processes."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    os.environ["NNCF_CI"] = "1"  # with this, NNCF replaces its telemetry by a stub
    # None makes the import of this module fail, which OpenVINO and NNCF treat as "not installed".
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # typeshed knows no None here
