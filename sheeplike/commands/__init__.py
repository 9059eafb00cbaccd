"""The command line. Nothing outside this package sees a config object."""
