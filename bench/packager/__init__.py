"""Build bundles: time, accuracy, what the lowering covers."""
