"""The versions of a model on the device: A/B slots, installation, trial limits, claims."""
