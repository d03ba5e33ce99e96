"""Patches: the size and the time with EdgeRT's settings of zstd and with zstd's own levels, for 26 MB of INT8.

The same weights have two successors: one has another last layer, and in the other, all layers were trained further
(`int8_weights`). Each setting makes each patch in turn, and the patch must restore the same bytes.

    python -m bench.patches
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import zstandard

from bench.support.bundles import int8_weights
from bench.support.tables import emit
from edgert.bundle.delta import WINDOW_BYTES_MAX
from edgert_deploy.rollout import delta as deltas

COLUMNS = ("change", "made_by", "bytes", "seconds", "bytes_over_ours", "seconds_over_ours")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=float, default=26.0, help="of weights (26)")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    options = parser.parse_args()
    old, layer, all_of_it = (int8_weights(release, int(options.size_mb * 1e6)) for release in (1, 2, 3))
    ways: dict[str, Callable[[bytes, bytes], bytes]] = {
        "ours": deltas.make_patch,
        "level 9": lambda new, old: by_level(new, old, 9),
        "level 19": lambda new, old: by_level(new, old, 19),
        "level 19 without the old": lambda new, old: zstandard.compress(new, 19),
    }
    rows: list[dict[str, object]] = []
    for change, new in (("last layer", layer), ("all layers", all_of_it)):
        ours = (0, 0.0)
        for name, make in ways.items():
            begun = time.perf_counter()
            size = len(made := make(new, old))
            seconds = time.perf_counter() - begun
            ours = ours if ours[0] else (size, seconds)
            assert unpacked(made, old, len(new)) == new
            rows.append(
                {
                    "change": change,
                    "made_by": name,
                    "bytes": size,
                    "seconds": round(seconds, 2),
                    "bytes_over_ours": round(size / ours[0], 2),
                    "seconds_over_ours": round(seconds / ours[1], 2),
                }
            )
    emit(rows, COLUMNS, options.json)


def by_level(new: bytes, old: bytes, level: int) -> bytes:
    """Return settings whose window covers both files, and which otherwise are the defaults of the level."""
    known = zstandard.ZstdCompressionDict(old, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    settings = zstandard.ZstdCompressionParameters.from_level(
        level, window_log=(len(old) + len(new)).bit_length(), enable_ldm=True, source_size=len(new), dict_size=len(old)
    )
    return zstandard.ZstdCompressor(dict_data=known, compression_params=settings).compress(new)


def unpacked(made: bytes, old: bytes, size: int) -> bytes:
    known = zstandard.ZstdCompressionDict(old, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    reader = zstandard.ZstdDecompressor(dict_data=known, max_window_size=WINDOW_BYTES_MAX)
    return bytes(reader.decompress(made, max_output_size=size))


if __name__ == "__main__":
    main()
