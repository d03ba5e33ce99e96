"""Scripts that convert models to ONNX.

Each script runs by its path, in a Python that has the framework.

The scripts import nothing of EdgeRT. The argument is one JSON object, `{"model", "out", "inputs"}`. After exit code 3,
the last line of stderr is the reason of the failure. After exit code 4, this line names a missing package. After exit
code 5, it is the reason with the next step.
"""
