"""What the daemon and its workers exchange: messages with descriptors, and the page of engine runs."""
