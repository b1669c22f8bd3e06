"""Third stage: who is late, who should train together, and the document of the next generation."""
