"""The clients of the daemon: blocking, asyncio, and what both share."""
