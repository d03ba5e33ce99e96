"""The follower: rounds that ask a registry for this device's channel, and install its releases."""
