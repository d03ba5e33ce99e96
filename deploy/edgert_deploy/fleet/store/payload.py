"""Compresses flat payloads for the store, with a dictionary of what most of them contain."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

from edgert.telemetry.messages import Scalar

# Text of most payloads, so that a single one compresses; the last bytes are the cheapest.
_DICTIONARY = (
    b',"throttled":0,"temp_c":,"rss_bytes":,"clock_synced":1,"encode_p99_ms":0.,"postprocess_p99_ms":0.,'
    b'"engine_p99_ms":0.,"queue_p99_ms":0.,"cache_p99_ms":0.,"preprocess_p99_ms":0.,"decode_p99_ms":0.,'
    b'"batch_mean":1.0,"lat_le_1000ms_total":,"lat_le_500ms_total":,"lat_le_200ms_total":,"lat_le_100ms_total":,'
    b'"lat_le_50ms_total":,"lat_le_20ms_total":,"lat_le_10ms_total":,"lat_le_5ms_total":,"lat_le_2ms_total":,'
    b'"lat_le_1ms_total":,"lat_sum_ms_total":,"lat_max_ms":,"lat_p999_ms":,"lat_p99_ms":,"lat_p95_ms":,'
    b'"lat_p50_ms":,"cache_hit_total":0,"shed_total":0,"err_total":0,"req_total":,"up":1,"uptime_s":,'
    b'"window_s":60.0,"seq":,"boot":"b","ts":17,"v":1,"model_version":"r'
)


def pack_fields(fields: Mapping[str, Scalar]) -> bytes:
    """Compress a flat payload to about a third of its text."""
    deflate = zlib.compressobj(6, zdict=_DICTIONARY)
    return deflate.compress(json.dumps(fields, separators=(",", ":")).encode()) + deflate.flush()


def unpack_fields(blob: bytes) -> dict[str, Scalar]:
    fields: dict[str, Scalar] = json.loads(zlib.decompressobj(zdict=_DICTIONARY).decompress(blob))
    return fields
