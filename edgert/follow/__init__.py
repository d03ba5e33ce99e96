"""The follower: its rounds read this device's channel from a registry and install the releases."""
