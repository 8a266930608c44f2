"""What to change about running jobs, from what was measured of them: one decision per file, each a pure function.

Every change is a try: it is proposed where a forecast says that it may pay, measured (`trial`), and kept or undone.
The simulator and a live planner carry out the same proposals.
"""
