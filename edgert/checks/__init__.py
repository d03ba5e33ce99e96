"""Checks of the models that a device serves: golden samples, health, self-test, and benchmarks."""
