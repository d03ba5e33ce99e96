"""Child processes for vendors' tools, the output of these tools, and the folder of a build."""
