"""The plan: (job, observation, memory, clock) -> what to do, and why. Pure: no clock, no API, no randomness.

Order: failures, crashes, restarts (may end the job) -> generation (what the status says) -> standing of each worker -> what was
adopted -> completion -> membership, document -> workers -> progress, incidents, status -> commands. Each policy is a file of
its own and knows no other; job.py composes them. To change a policy read its file; the writing order (status before
announcement, release before deletion) is controller.py's.
"""
