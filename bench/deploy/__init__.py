"""Bring bundles to devices: bytes, time, the cost for the host."""
