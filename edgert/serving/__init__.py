"""The daemon: a supervisor that accepts and hands over connections, and one worker process a model."""
