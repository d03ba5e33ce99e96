"""One model in the daemon: its live version, restarts, rollbacks and trials."""
