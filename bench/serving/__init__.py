"""Serve requests: speed, memory, growth, hostile clients."""
