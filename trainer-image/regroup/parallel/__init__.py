"""How the work of a step is split over the ranks: `strategy` the seam, then one file for each: `ddp`, `exact`, `local_steps`.

What they share: `gradients` flat buckets, `buffers` running statistics, `fingerprint` what is compared.
"""
