"""Scripts of the ranks of `bench.gpu`. Each file is started as a script."""
