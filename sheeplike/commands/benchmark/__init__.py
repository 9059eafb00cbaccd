"""What ``bench`` measures, and how."""
