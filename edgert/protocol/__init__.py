"""The local protocols of apps and commands: tensor frames, shared memory, control messages, sockets."""
