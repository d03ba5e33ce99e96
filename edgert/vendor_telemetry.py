"""No SDK reports home from here: a project without a cloud does not give its users another's.

Tried: onnxruntime 1.31 keeps a device id and an event store in ~/.cache/Microsoft and knows
mobile.events.data.microsoft.com; importing openvino 2026.4 leaves an analytics client id in ~/intel;
NNCF sends what it was called with. Each can be told before it is imported, and only then.
"""

from __future__ import annotations

import os
import sys


def stop_reporting() -> None:
    """Keep the SDKs imported after this, here and in child processes, from reporting their use."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    os.environ["NNCF_CI"] = "1"  # NNCF then puts a stub in the place of its telemetry
    # None makes an import of it fail, which OpenVINO and NNCF take as "not installed".
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
