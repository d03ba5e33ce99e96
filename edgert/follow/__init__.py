"""The follower: rounds that read this device's channel from a registry, and install its releases."""
