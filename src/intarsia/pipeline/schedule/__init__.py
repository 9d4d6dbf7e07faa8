"""Schedules: made, played through with known costs, chosen among, drawn."""
