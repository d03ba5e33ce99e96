"""Child processes with limits, in which vendors' tools run; their output, and the folder of a build."""
