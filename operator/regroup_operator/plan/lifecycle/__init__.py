"""The stage of the lifecycle: what the job as a whole is in: refused, active, finishing, completing, suspended, or ended."""
