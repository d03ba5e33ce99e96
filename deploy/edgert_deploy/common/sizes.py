"""Bytes as people read them."""

from __future__ import annotations


def size_text(size_bytes: int) -> str:
    """`12.3 MB`, `4.5 kB` or `67 bytes`; decimal, as disks and networks count."""
    if size_bytes >= 1_000_000:
        return f"{size_bytes / 1e6:.1f} MB"
    return f"{size_bytes / 1e3:.1f} kB" if size_bytes >= 1000 else f"{size_bytes} bytes"
