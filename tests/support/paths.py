"""The paths of the repository and of a folder in memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "digits"
# A folder in memory for files that need not survive a power cut, because their flushes would wait for a busy disk. None
# if there is none, or only the small one of a Docker container.
_MEMORY, _BYTES_MIN = "/dev/shm", 2**30
IN_MEMORY = _MEMORY if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _BYTES_MIN else None
