"""Trained models: dreams, probes, likelihood, the report, and the page that plays a dream beside the simulator."""
