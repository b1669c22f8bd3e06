"""Second stage: what the job as a whole is in: refused, active, or ended."""
