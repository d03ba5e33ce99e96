"""An OCI registry as the place of releases and channels: addresses, logins, requests."""
