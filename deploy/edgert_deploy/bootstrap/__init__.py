"""Turn a bare machine into a device that takes deployments, and back: runtime, wheels, service."""
