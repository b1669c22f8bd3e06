"""The tour behind `make demo`, and the parts of it that the end-to-end tests share.

`installation` puts the operator into a cluster through its chart, `job` reads one job, `faults` breaks things for real,
`tour` is the tour itself. Nothing here belongs to the product.
"""
