"""The signed bundle: file, manifest, envelope, signing keys, processing rules, and deltas."""
