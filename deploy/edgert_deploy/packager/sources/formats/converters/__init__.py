"""Scripts that convert models to ONNX, each run by path in a Python that has the framework.

They import nothing of EdgeRT. Argument: one JSON object, `{"model", "out", "inputs"}`. Exit code 3 means that the last
line of stderr tells the user why the conversion failed, 4 that it names a missing package.
"""
