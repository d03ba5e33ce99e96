"""Comparison of live answers with a reference's answers, in a separate process."""
