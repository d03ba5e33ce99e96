"""The system around the daemon: lock, descriptors, systemd, other processes, leftover files."""
