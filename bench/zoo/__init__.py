"""Quantize trained models that EdgeRT's authors did not make, and compare with the vendors' own recipes."""
