"""Worlds that differ: drawn anew for each episode, from lines that say what varies and how."""
