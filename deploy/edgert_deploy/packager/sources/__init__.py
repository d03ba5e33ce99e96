"""Read models: ONNX and TFLite directly, Keras and PyTorch through converters, all in a sandbox."""
