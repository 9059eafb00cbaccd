"""Environments simulated and rendered by MuJoCo MJX-Warp."""
