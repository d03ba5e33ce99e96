"""The system around the daemon: its lock and descriptors, systemd, processes beside the workers, leftover files."""
