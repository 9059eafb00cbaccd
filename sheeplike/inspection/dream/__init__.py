"""A trained world model played beside the real simulator, in a browser."""
