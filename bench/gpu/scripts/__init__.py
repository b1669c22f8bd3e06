"""What the ranks of `bench.gpu` run. Each file is started as a script."""
