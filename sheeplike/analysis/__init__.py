"""Finished runs: reading them, statistics over seeds, tables and figures. Nothing on the way of a run imports this."""
