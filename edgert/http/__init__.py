"""The Open Inference Protocol v2 over HTTP (docs/http.md): a separate process, off by default."""
