"""Parts of commands: options and their types, the requests made of them, output, work on many devices."""
