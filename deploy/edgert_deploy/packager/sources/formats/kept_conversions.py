"""Keeps the ONNX models converted from other frameworks, because a framework takes seconds to start.

Each conversion is a file with the ONNX model and its SHA-256. If this file is absent, damaged or not writable, the
build converts the model again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from edgert.durable import replace_file

FILES_MAX = 8
BYTES_MAX = 1024**3  # the limit for all kept conversions
DIGEST_BYTES = 32


@dataclass(frozen=True)
class KeptConversions:
    """The most recently used conversions, in `folder`."""

    folder: Path

    def get(self, key: str) -> bytes | None:
        """Return the model that `put` kept under `key`; None if its file is absent or damaged."""
        with contextlib.suppress(OSError):
            data = (self.folder / key).read_bytes()
            if hashlib.sha256(data[DIGEST_BYTES:]).digest() == data[:DIGEST_BYTES]:
                os.utime(self.folder / key)
                return data[DIGEST_BYTES:]
        return None

    def put(self, key: str, model: bytes) -> None:
        """Keep `model` under `key`, then remove the least recently used models until the limits hold."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            data = hashlib.sha256(model).digest() + model
            replace_file(self.folder / key, data, durable=False, shared=True)
            kept = sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
            total = 0
            for number, path in enumerate(kept, start=1):
                total += path.stat().st_size
                if number > FILES_MAX or total > BYTES_MAX:
                    path.unlink()
