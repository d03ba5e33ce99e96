"""The signed bundle: its file, manifest, envelope, signing keys, processing rules, and deltas between bundles."""
