"""Where vendors' tools run: child processes with limits, their output, and the folder of a build."""
