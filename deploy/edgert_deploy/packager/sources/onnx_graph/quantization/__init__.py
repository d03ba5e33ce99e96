"""Graphs that are already quantized: which kind they are, and how an engine gets them."""
