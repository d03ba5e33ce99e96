"""The supervisor process: it accepts connections, hands them over, and keeps the workers running."""
