"""The strategies that split the work of a step over the ranks. `strategy` is the seam, and each strategy has a file: `ddp`,
`exact`, `local_steps`.

What they share: `gradients` flat buckets, `buffers` running statistics, `fingerprint` what is compared.
"""
