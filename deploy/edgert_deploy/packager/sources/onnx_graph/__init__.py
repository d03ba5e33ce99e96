"""The graph of an ONNX model: its nodes, axes, branches and opset."""
