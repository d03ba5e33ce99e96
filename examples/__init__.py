"""Example models and programs."""
