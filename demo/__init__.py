"""The tour behind `make demo`, and `local`, the tour without a cluster behind `make run`.

`tour` prepares and ends the tour, `acts` breaks things in order, `follow` reads the trainers' log, `live` shows the
job. Parts that the tests share (faults, job views, the judge) are in harness/.
"""
