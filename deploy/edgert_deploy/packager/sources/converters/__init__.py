"""Scripts that turn other frameworks' models into ONNX. Each is run by its path, in whichever Python has the framework.

They import nothing of ours. Arguments: one JSON object, `{"model", "out", "inputs"}`. What the user must know is the
last line of stderr, and the exit code is then 3.
"""
