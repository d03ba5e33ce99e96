"""Devices under test and the parts that the tests and commands of `hil/` share."""
