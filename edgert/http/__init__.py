"""The Open Inference Protocol v2 over HTTP (docs/http.md): a process of its own beside the daemon, off by default."""
