"""Building blocks that every agent shares: layers, vision, distributions, optimizers, normalizers."""
