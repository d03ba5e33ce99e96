"""Check what a device serves: golden samples, health, self-test, and benchmarks."""
