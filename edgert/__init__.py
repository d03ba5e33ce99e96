"""EdgeRT on the device: the client, the errors, the version.

Importing this package imports almost nothing: every program does it before it can react to Ctrl-C (edgert.entry). The
clients import NumPy when they are first used.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # type checkers treat this name as true; `typing` is slow to import
if TYPE_CHECKING:
    from typing import Any

    from edgert.client.aio import AsyncClient as AsyncClient
    from edgert.client.blocking import Client as Client
    from edgert.errors import EdgeRTError as EdgeRTError

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "EdgeRTError", "__version__", "include_dir"]


def include_dir() -> str:
    """Return the folder of `edgert.h`, the C client.

    Use it as `cc -I"$(python3 -c 'import edgert; print(edgert.include_dir())')" ...`.
    """
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "include")


def __getattr__(name: str) -> Any:
    if name == "Client":
        from edgert.client.blocking import Client

        return Client
    if name == "AsyncClient":
        from edgert.client.aio import AsyncClient

        return AsyncClient
    if name == "EdgeRTError":
        from edgert.errors import EdgeRTError

        return EdgeRTError
    raise AttributeError(f"module 'edgert' has no attribute {name!r}")
