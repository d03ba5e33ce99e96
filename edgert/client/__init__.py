"""The clients of the daemon: a blocking client, an asyncio client, and their common parts."""
