"""Engines that step the worlds: MJX-Warp on a GPU, MuJoCo's own on a CPU."""
