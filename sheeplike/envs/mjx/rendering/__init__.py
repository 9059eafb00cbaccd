"""Camera frames of all worlds in one batch, straight to uint8."""
