"""The worker process: one version of one model, from the received frame to the reply."""
