"""The packager: a model, samples and profiles become gated artifacts in one signed bundle."""
