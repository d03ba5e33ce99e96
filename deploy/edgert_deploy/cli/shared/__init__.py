"""What several commands share: options and their types, output, work on many devices."""
