"""One model in the daemon: the version that its slots name, restarts, rollbacks and trials."""
