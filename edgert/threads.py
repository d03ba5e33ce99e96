"""The stack of threads that parse data from others."""

from __future__ import annotations

import sys

# Python 3.13 limits nested JSON by a count that needs this stack: with less, deep nesting would end the process.
STACK_BYTES = (4096 if sys.version_info >= (3, 13) else 512) * 1024  # address space; memory is used only as needed
