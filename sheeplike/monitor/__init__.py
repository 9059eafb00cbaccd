"""Metrics, logs, videos and progress of a run."""
