"""From a bundle and a device's facts to a plan and its steps, on one device or in waves over a fleet."""
