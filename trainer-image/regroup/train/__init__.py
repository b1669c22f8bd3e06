"""A ready training loop over `regroup.session`: what to train is a configuration, not a script.

Belongs here: the configuration, tasks (a model and its data), how both are put together, and the loop. Does not: anything that
a script could not do with `regroup.session` itself. Nothing else of the library imports this room; only it needs pydantic,
pyyaml and scikit-learn. Read `loop` first. Why it is so: docs/design/adr/0028-the-loop.md.
"""
