"""A run, and what surrounds its loop."""
