"""Shared by all packages of the host: the project, folders, keys, parallel work, quantities as text."""
