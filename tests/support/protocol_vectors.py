"""docs/protocol-vectors.json: the frames that implementations in every language are tested against."""

from __future__ import annotations

import json

from edgert.protocol import wire
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
VECTORS = json.loads((DOCS / "protocol-vectors.json").read_text())
KINDS = {
    "HELLO": wire.HELLO,
    "WELCOME": wire.WELCOME,
    "INFER": wire.INFER,
    "RESULT": wire.RESULT,
    "ERROR": wire.ERROR,
    "PING": wire.PING,
    "PONG": wire.PONG,
    "MOVED": wire.MOVED,
    "RESUME": wire.RESUME,
}
