"""The memory of all models: which version may load now, and which ones are unloaded for it."""
