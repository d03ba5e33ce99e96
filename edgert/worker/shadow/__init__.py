"""Comparison of live answers with those of a reference, in a separate process."""
