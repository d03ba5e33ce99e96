"""The local protocols without sockets of their own: tensor frames, shared memory, control messages."""
