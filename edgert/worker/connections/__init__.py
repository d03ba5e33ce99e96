"""Clients of a worker: who gets a connection, what serves it, its shared memory and its session."""
