"""Receive the fleet's reports: exporter, store, page."""
