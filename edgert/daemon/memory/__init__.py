"""The memory of all models: decides which version may load now, and which models must unload for it."""
