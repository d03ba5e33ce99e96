"""How the threads of a process that reads what others send are made."""

from __future__ import annotations

import sys

# Python 3.13 bounds nested JSON by a count that needs more stack: what is nested deeper would end the process.
STACK_BYTES = (4096 if sys.version_info >= (3, 13) else 512) * 1024  # address space; used is what is touched
