"""Checks of the source itself: `PYTHONPATH=tools python -m guards.NAME`."""
