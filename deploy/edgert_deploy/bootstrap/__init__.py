"""Sets up a bare machine as a device that accepts deployments, and removes the set-up again."""
