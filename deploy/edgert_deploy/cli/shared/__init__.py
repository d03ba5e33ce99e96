"""The common parts of commands: options and their types, output, work on many devices."""
