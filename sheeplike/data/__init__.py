"""Recorded episodes: read from the layouts of several projects, checked, and written."""
