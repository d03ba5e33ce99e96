"""The graph of an ONNX model: its axes and nodes, and the rewrites that every engine needs."""
