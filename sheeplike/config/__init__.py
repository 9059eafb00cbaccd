"""From a command line and files to one checked, typed, frozen configuration."""
