"""Pre- and post-processing that the manifest states: pure functions over arrays."""
