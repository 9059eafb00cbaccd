"""Trained agents as files, and what lets them act."""
