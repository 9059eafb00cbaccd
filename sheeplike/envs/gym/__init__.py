"""Any Gymnasium environment as a vector environment of ours, and recipes for families of them."""
