"""`make bench-scale`: how many jobs and pods the operator serves, beside JobSet, Kubeflow Trainer and the Job controller.

Here is everything of it: a control plane with fake nodes (`plane`), what is measured (`system`, `peers`, `operator`,
`scenarios`), the counting (`audit`, `meter`) and the report. Nothing here is imported by the product.
"""
