"""The plan: (job, observation, memory, clock) -> what to do, and why. Pure: no clock, no API, no randomness.

plan_job in job.py is one straight line of stages. Each is a folder, and its file of the same name puts its policies together:

    facts        the newest generation, how each worker stands in it, its progress
    failures     the failures, which of them count, and which of them fail the job
    lifecycle    the state of the job as a whole: refused, active, finishing, completing, suspended, ended
    generation   the late workers, the workers that should train together, the next document
    pods         the pods that there should be
    report       the status, and the events
    commands     the commands for each agent

A stage returns a frozen result with its reasons and the time (`due_s`) at which the job is planned again. No stage reads what a
later one finds. The stages read the memory of the plan before. From their results remember.py makes the memory for the next plan.

Each policy is a file of its own with a table test of the same name. Policies of one stage know no other. controller.py owns the
writing order: status before announcement, release before deletion.
"""
