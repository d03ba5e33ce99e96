"""Comparison of live answers with those of a reference, in a process of its own."""
