"""The link between the daemon and its workers: messages with descriptors, and the page of engine runs."""
