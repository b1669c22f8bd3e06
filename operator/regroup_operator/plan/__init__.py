"""The plan: (job, observation, memory, clock) -> what to do, and why. Pure: no clock, no API, no randomness.

plan_job in job.py is one straight line of stages, each a folder whose file of the same name puts its policies together:

    facts        what is known: the newest generation, how each worker stands in it, its progress
    failures     what has failed, what is counted, and what of it fails the job
    lifecycle    what the job as a whole is in: refused, active, finishing, completing, suspended, ended
    generation   who is late, who should train together, the next document
    pods         which pods there should be
    report       the status, and the events
    commands     what each agent is told

A stage returns a frozen result with its reasons and the time at which it has to be looked at again; none reads what a later one
finds. Each policy is a file of its own with a table test of the same name, and policies of one stage know no other. The writing
order (status before announcement, release before deletion) is controller.py's.
"""
