"""Candidates, the forms of the model that could be packed: builds, judges, times and chooses them."""
