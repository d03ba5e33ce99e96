"""The follower: rounds that ask a registry for the channel of this device, and install what its statement names."""
