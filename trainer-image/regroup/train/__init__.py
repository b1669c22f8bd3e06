"""A ready training loop over `regroup.session`, which trains a configuration in place of a script.

Belongs here: the configuration, tasks (a model and its data), the assembly of both, and the loop. Does not: anything that
a script could not do with `regroup.session` itself. No other room of the library imports this one, and no other needs
pydantic, pyyaml and scikit-learn. Read `loop` first. The reasons are in docs/design/adr/0028-the-loop.md.
"""
