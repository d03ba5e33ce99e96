"""Parts that commands share: options and their types, output, and work on many devices."""
