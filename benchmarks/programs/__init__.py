"""`make programs`: public programs, unmodified, run alone and then under Ganger, which stops, saves and moves them.

Each program has to end with the same log and the same files, byte by byte, as alone.
"""
