"""Clients of a worker: admission, the threads that serve connections, shared memory and sessions."""
