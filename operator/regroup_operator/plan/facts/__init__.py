"""What is known before anything is decided: the newest generation, how each worker stands in it, its progress."""
