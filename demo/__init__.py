"""The tour behind `make demo`, and the parts of it that the end-to-end tests share.

`installation` puts the operator into a cluster through its chart, `job` reads one job, `follow` and `steps` its trainers' log,
`faults` breaks things for real, `acts` does so in the order that `tour` asks for. Nothing here belongs to the product.
"""
