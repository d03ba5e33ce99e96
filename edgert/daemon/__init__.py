"""The supervisor process: it accepts connections, passes them on, and keeps the workers running."""
