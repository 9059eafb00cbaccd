"""What a run tells the world: metrics that stay on the device until they are written, logs, video, progress."""
