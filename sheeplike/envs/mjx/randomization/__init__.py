"""Domain randomization: differences between worlds, drawn anew for each episode from lines of a configuration."""
