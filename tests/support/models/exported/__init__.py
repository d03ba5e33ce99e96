"""Models as PyTorch's exporters write them; `make_exported.py` made the files."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
