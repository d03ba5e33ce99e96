"""Packed histograms keep every count."""

from __future__ import annotations

from edgert.telemetry import messages
from edgert.telemetry.sketch import Sketch
from edgert_deploy.fleet.packed import Dense, Pool, pack, unpack
from edgert_deploy.fleet.store.payload import pack_fields, unpack_fields


def test_packed_histograms_are_what_they_were() -> None:
    buckets = {640: 1, -320: 2**40, 7: 3}
    dense = Dense()
    dense.add(pack(buckets))
    assert dense.packed() == pack(buckets)
    assert unpack(pack(buckets)) == buckets
    pool = Pool(2)
    pool.add([1, 1], [pack(buckets), pack({7: 1})])
    pool.add_scalars([1, 1], [[2, 0], [2**40 + 6, 0], [5.0, 0.0], [0.001, 0.0], [9.0, 0.0]])
    assert pool.sketch(1).buckets == {640: 1, -320: 2**40, 7: 4}
    assert pool.sketch(0) == Sketch()
    fields: dict[str, messages.Scalar] = {"v": 1, "boot": "b1", "temp_c": 51.5, "anything": "else"}
    assert unpack_fields(pack_fields(fields)) == fields
