"""Plain servers that teams write today, with the same engine inside: what ours is compared with."""
