"""Deploys a bundle: plans from a device's facts and executes the plan, on a fleet in waves."""
