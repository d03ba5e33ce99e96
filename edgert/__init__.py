"""EdgeRT on the device: the client, the errors, the version.

Importing this package costs the standard library only; `Client` brings NumPy when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgert.errors import EdgeRTError

if TYPE_CHECKING:
    from edgert.client import Client as Client

__version__ = "0.1.0"
__all__ = ["Client", "EdgeRTError", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Client":
        from edgert.client import Client

        return Client
    raise AttributeError(f"module 'edgert' has no attribute {name!r}")
