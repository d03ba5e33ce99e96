"""The follower: in each round, it reads this device's channel from a registry and installs the releases."""
