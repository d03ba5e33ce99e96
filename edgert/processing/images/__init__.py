"""Images and frames as a model's input: decoded, resized, normalized."""
