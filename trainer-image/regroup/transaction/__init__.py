"""The commit of one step, all or nothing: `header` what ranks tell each other (pure), `commit` what follows from it."""
