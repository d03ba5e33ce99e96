"""From a model, samples and profiles to INT8 artifacts that passed the accuracy gate, in one signed bundle."""
