"""Deploys a bundle: makes a plan from a device's facts and executes it, also in waves over a fleet."""
