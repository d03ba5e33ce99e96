"""Sound and sensor series as a model's input: windows, and their features."""
