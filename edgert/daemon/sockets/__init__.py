"""The daemon's sockets: connections of apps, and commands of `edgertd` with their answers."""
