"""How the work of a step is split over the ranks: `reducer` gradients, `buffers` running statistics."""
