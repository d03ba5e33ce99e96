"""Scripts that convert models to ONNX.

The build starts each script by its path, in a Python that has the framework.

The scripts import nothing of EdgeRT. The only argument of a script is a JSON object, `{"model", "out", "inputs"}`.
After exit code 3, the last line of stderr gives the reason of the failure. After exit code 4, this line names a missing
package. After exit code 5, this line gives the reason with the next step.
"""
