"""Candidates: the forms of the model that could be packed: built, judged, timed, and the best chosen."""
