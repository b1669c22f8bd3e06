"""The stage of failures: what has failed since the last plan, what is counted, and what of it fails the job."""
