"""Composition of a command line and files into one checked, typed, frozen configuration."""
