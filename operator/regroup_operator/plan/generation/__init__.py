"""The stage of the generation: who is late, who should train together, and the document of the next generation."""
