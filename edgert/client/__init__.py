"""The clients of the daemon: blocking, asyncio, and their common parts."""
