"""Models and programs to start from."""
