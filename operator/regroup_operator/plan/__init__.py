"""The plan: (job, observation, memory, clock) -> what to do, and why. Pure: no clock, no API, no randomness.

Order: restarts (may end the job) -> standing of each worker -> what was adopted -> completion -> membership -> workers ->
status. Each policy is a file of its own and knows no other; job.py composes them. To change a policy read its file; the
writing order (status before announcement, release before deletion) is controller.py's.
"""
