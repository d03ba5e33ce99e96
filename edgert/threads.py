"""The stack size of threads that parse data from other processes."""

from __future__ import annotations

import sys

# Python 3.13 limits the nesting of JSON by a count, and a thread needs this stack to reach the count. With a smaller
# stack, deep nesting ends the process.
STACK_BYTES = (4096 if sys.version_info >= (3, 13) else 512) * 1024  # address space; the kernel adds memory as needed
