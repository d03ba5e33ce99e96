"""Pre- and post-processing by the manifest's rules: pure functions over arrays."""
