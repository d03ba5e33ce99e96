"""Scripts that convert models to ONNX, each run by path in a Python that has the framework.

The scripts import nothing of EdgeRT. The argument is one JSON object, `{"model", "out", "inputs"}`. With exit code 3,
the last line of stderr is the reason of the failure; with 4, it names a missing package.
"""
