"""The tour behind `make demo`. What it shares with the tests (faults, job views, the judge) is in harness/.

`tour` prepares and ends it, `acts` breaks things in order, `follow` reads the trainers' log, `live` shows the job meanwhile.
"""
