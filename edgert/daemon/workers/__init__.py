"""Worker processes in the daemon: it starts, switches, watches and ends them."""
