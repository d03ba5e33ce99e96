"""Rewrites of a graph that every engine needs; each module mends one form of graph."""
