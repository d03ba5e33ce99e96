"""An OCI registry, which stores releases and channels: addresses, logins, requests."""
