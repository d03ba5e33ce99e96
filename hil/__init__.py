"""Devices under test, virtual or real, and the tests that run on any of them."""
